#!lua
--[[
Appends one turn to a session, making the session when a root turn comes first, and ends the turn's lease, refused or
not. Every check precedes the first write of the turn, and a turn that is there already is left alone, so the call may
be repeated for ever. A lease that vanished is no reason to refuse; one that was taken over is.

KEYS  1 session  2 links  3 turns  4 tokens  5 logprobs  6 text  7 shared  8 index  9 requests  10 rewards
     11 attempts  12 delivered
ARGV  1 turn  2 parent or "%"  3 root  4 rendering signature  5 root fact (roots only)
      6 now, ISO-8601  7 the store's TTL in ms, 0 for none
      8 link line but for its first two fields
      9 delta's field  10 delta's ids  11 generation's ids  12 log probs
     13 record  14 text  15 settings' field  16 settings  17 rendering's field or "%"  18 rendering
     19 chain hash  20 request hash  21 idempotency field or ""
     22 tokens  23 sampled tokens  24 model
     25 worker  26 ... the session's fields, name, value ..., should it have to be made
Result
  {"committed", the session's run} {"repeated", the session's run}
  {"deleted"} {"finished"} {"no_parent"} {"other_rendering"}
  {"fenced", the attempt that took over, or "%"}
  {"answered", turn and request hash under the idempotency field}
]]
local session, links, turns, tokens, log_probs, text, shared, index, requests = unpack(KEYS)
local attempts, delivered = KEYS[11], KEYS[12]
local turn, parent, root, signature = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now, default_ttl_ms, tail = ARGV[6], tonumber(ARGV[7]), ARGV[8]
local delta_field, delta, generated, probabilities = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local settings_field, rendering_field = ARGV[15], ARGV[17]
local chain, request, idempotency = ARGV[19], ARGV[20], ARGV[21]
local NOTHING = '%'

local state, n_turns, n_tokens, n_sampled, ttl_s, run =
  unpack(redis.call('HMGET', session, 'state', 'turns', 'tokens', 'sampled_tokens', 'ttl_s', 'run'))

if redis.call('HEXISTS', links, turn) == 1 then return {'repeated', run or ''} end
local taken = redis.call('HGET', attempts, 'taken:' .. turn)
if taken then return {'fenced', taken} end

local left = {}
for id, worker in string.gmatch(redis.call('HGET', attempts, request) or '', '(%S+) (%S+)') do
  if id ~= turn then left[#left + 1] = id .. ' ' .. worker end
end
if #left > 0 then
  redis.call('HSET', attempts, request, table.concat(left, ' '))
else
  redis.call('HDEL', attempts, request)
end
redis.call('HDEL', attempts, 'waits:' .. turn)
if idempotency ~= '' and string.match(redis.call('HGET', attempts, idempotency) or '', '^%S+') == turn then
  redis.call('HDEL', attempts, idempotency)
end

if state == 'deleted' or state == 'finished' then return {state} end
local parent_line
if parent ~= NOTHING then
  parent_line = redis.call('HGET', links, parent)
  if not state or not parent_line then return {'no_parent'} end
  local fact = redis.call('HGET', session, 'root:' .. root) or ''
  if string.sub(fact, 1, #signature + 1) ~= signature .. ' ' then return {'other_rendering'} end
end
if idempotency ~= '' then
  local answered = redis.call('HGET', requests, idempotency)
  if answered then return {'answered', answered} end
end

local function append(key, field)
  local before = redis.call('HGET', key, field)
  redis.call('HSET', key, field, before and before .. ' ' .. turn or turn)
end
local function plus(before, added)
  return string.format('%.0f', (tonumber(before) or 0) + tonumber(added))
end

if not state then
  for i = 2, 12 do
    if i ~= 11 then redis.call('UNLINK', KEYS[i]) end -- left by a session of this name that has expired
  end
  redis.call('HSET', session, unpack(ARGV, 26))
end
if parent_line and string.sub(parent_line, 1, 1) == '0' then
  redis.call('HSET', links, parent, '1' .. string.sub(parent_line, 2))
end
redis.call('HDEL', delivered, parent) -- who goes on from a turn has received it
redis.call('HSET', delivered, turn, ARGV[25])
redis.call('HSET', links, turn, '0 ' .. redis.call('HLEN', links) + 1 .. ' ' .. tail)
redis.call('HSET', turns, turn, ARGV[13])
redis.call('HSET', text, turn, ARGV[14])
redis.call('HSETNX', shared, settings_field, ARGV[16])
if rendering_field ~= NOTHING then redis.call('HSETNX', shared, rendering_field, ARGV[18]) end
if delta ~= '' then redis.call('HSETNX', tokens, delta_field, delta) end
if generated ~= '' then
  redis.call('HSET', tokens, turn, generated)
  redis.call('HSET', log_probs, turn, probabilities)
end
append(index, chain)
append(requests, request)
if idempotency ~= '' then redis.call('HSET', requests, idempotency, turn .. ' ' .. request) end
if parent == NOTHING then redis.call('HSET', session, 'root:' .. turn, ARGV[5]) end
redis.call('HSET', session, 'turns', plus(n_turns, 1), 'tokens', plus(n_tokens, ARGV[22]),
  'sampled_tokens', plus(n_sampled, ARGV[23]), 'last_turn', turn, 'updated', now, 'model', ARGV[24])

-- Every write of a TTL goes to the append-only file, so it is rewritten once a sixteenth has passed.
if not state then ttl_s, run = unpack(redis.call('HMGET', session, 'ttl_s', 'run')) end
local ttl_ms = ttl_s and tonumber(ttl_s) * 1000 or default_ttl_ms
if ttl_ms > 0 then
  local due = redis.call('PTTL', session) < ttl_ms - ttl_ms / 16
  for i = 1, 10 do due = due or redis.call('PTTL', KEYS[i]) == -1 end
  -- All together: a session whose main key went before the others could be neither read nor continued.
  for _, key in ipairs(KEYS) do
    if due then redis.call('PEXPIRE', key, ttl_ms) end
  end
  -- These two come and go with each turn.
  local left = redis.call('PTTL', session)
  for i = 11, 12 do
    if redis.call('PTTL', KEYS[i]) == -1 then redis.call('PEXPIRE', KEYS[i], left) end
  end
end
return {'committed', run or ''}
