#!lua flags=no-writes
--[[
All that is stored of one turn.

KEYS  1 session  2 links  3 turns  4 tokens  5 logprobs  6 text  7 shared
ARGV  1 turn
Result  {state of the session or nil} when there is no such turn, else
        {state, link line, record, delta's ids, generation's ids, log probs, text, settings, root fact, rendering}
]]
local session, links, turns, tokens, log_probs, text, shared = unpack(KEYS)
local turn = ARGV[1]
local state = redis.call('HGET', session, 'state')
local line = redis.call('HGET', links, turn)
if not line then return {state} end
local words = {}
for word in string.gmatch(line, '%S+') do words[#words + 1] = word end
local is_root = words[4] == '%'
local fact = redis.call('HGET', session, 'root:' .. (is_root and turn or words[4]))
local rendering = is_root and fact and redis.call('HGET', shared, string.match(fact, '^%S+ %S+ (%S+)'))
return {
  state, line, redis.call('HGET', turns, turn), redis.call('HGET', tokens, words[8]),
  redis.call('HGET', tokens, turn), redis.call('HGET', log_probs, turn), redis.call('HGET', text, turn),
  redis.call('HGET', shared, words[12]), fact, rendering,
}
