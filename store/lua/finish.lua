#!lua
--[[
Seals a session. Repeating it changes nothing; another status or reward replaces the earlier one.

KEYS  1 session
ARGV  1 now, ISO-8601  2 status or ""  3 reward or ""
Result  {"missing"} {"deleted"} {"finished", the main key as name, value, name, value ...}
]]
local session, now, status, reward = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local state = redis.call('HGET', session, 'state')
if not state then return {'missing'} end
if state == 'deleted' then return {'deleted'} end
if state == 'open' then redis.call('HSET', session, 'state', 'finished', 'finished', now, 'updated', now) end
if status ~= '' then redis.call('HSET', session, 'status', status) end
if reward ~= '' then redis.call('HSET', session, 'reward', reward) end
return {'finished', redis.call('HGETALL', session)}
