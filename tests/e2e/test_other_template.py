"""A model whose turns do not end with `<|im_end|>`: its own end and glue, read off its own template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from api.demo.processes import Child
from tests.e2e.stack import Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = (
    "{% for m in messages %}<|object_ref_start|>{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|object_ref_start|>assistant: {% endif %}"
)


async def test_a_template_with_another_end_marker_gets_its_own_glue(
    stack: Stack, start_worker: Callable[..., Child], tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE)
    worker = start_worker(stack.redis_url, stack.engine.url, "--chat-template", str(template))
    await worker.start()
    try:
        await worker.ready(stack.client, 60)
        talk = Talk(stack)
        await stack.script({"text": "Hi there.<|endoftext|>", "eos": False})
        await talk.say("Hello.", worker=worker.url)
        again = await talk.say("Again.", worker=worker.url)
    finally:
        await worker.stop()
    assert again.splice == "spliced"
    await talk.assert_all_contiguous()
    text = await stack.rendered(again.turn_id)
    assert text.endswith(
        "<|object_ref_start|>assistant: Hi there.<|endoftext|>"
        "<|object_ref_start|>user: Again.<|endoftext|><|object_ref_start|>assistant: "
    )
    assert "<|im_end|>" not in text
