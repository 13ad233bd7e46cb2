#!lua
--[[
Sets the reward of a session or of one of its turns; a turn that is rewarded was delivered.

KEYS  1 session  2 links  3 rewards  4 delivered
ARGV  1 turn or "%" for the session  2 reward  3 source or ""  4 the turn's entry, JSON
Result  {"missing"} {"deleted"} {"no_turn"} {"set"}
]]
local session, links, rewards, delivered = unpack(KEYS)
local turn = ARGV[1]
local state = redis.call('HGET', session, 'state')
if not state then return {'missing'} end
if state == 'deleted' then return {'deleted'} end
if turn == '%' then
  redis.call('HSET', session, 'reward', ARGV[2], 'reward_source', ARGV[3])
  return {'set'}
end
if redis.call('HEXISTS', links, turn) == 0 then return {'no_turn'} end
redis.call('HSET', rewards, turn, ARGV[4])
redis.call('HDEL', delivered, turn)
local ttl_ms = redis.call('PTTL', session)
if ttl_ms > 0 then redis.call('PEXPIRE', rewards, ttl_ms) end
return {'set'}
