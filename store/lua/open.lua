#!lua
--[[
Makes a session unless it is there. The caller's mark tells a repeat by the same caller from another's session.

KEYS  1 session
ARGV  1 mark  2 the store's TTL in ms, 0 for none  3 ... the session's fields, name, value ...
Result  {"created" or "exists", the main key as name, value, name, value ...}
]]
local session, mark, ttl_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local made = redis.call('EXISTS', session) == 0
if made then
  redis.call('HSET', session, 'opened_by', mark, unpack(ARGV, 3))
  local ttl_s = redis.call('HGET', session, 'ttl_s')
  if ttl_s then ttl_ms = tonumber(ttl_s) * 1000 end
  if ttl_ms > 0 then redis.call('PEXPIRE', session, ttl_ms) end
end
local ours = made or redis.call('HGET', session, 'opened_by') == mark
return {ours and 'created' or 'exists', redis.call('HGETALL', session)}
