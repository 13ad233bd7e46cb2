"""The simulated SGLang engine: a faithful stand-in on the wire, with an imagined model behind a real tokenizer.

It speaks the native HTTP API of SGLang 0.5.12, 0.5.13 and 0.5.23. Nothing of the product is imported here, so what
its record says about a prompt is an independent witness. One prompt and one answer a request; chat completions,
sessions, LoRA and media are not imitated.
"""

from api.demo.sim.app import create_sim
from api.demo.sim.config import SimConfig
from api.demo.sim.run import run, running, serve
from api.demo.sim.script import Directive

__all__ = ["Directive", "SimConfig", "create_sim", "run", "running", "serve"]
