#!lua flags=allow-oom
--[[
Deletes a session's keys and leaves a tombstone, so that late turns are told. It frees memory, so a full server
runs it.

KEYS  1 session, then every other key of its tree
ARGV  1 now, ISO-8601  2 the store's TTL in ms, 0 for none  3 the tombstone's TTL in ms where neither says
Result  {"missing"} {"deleted", run}
]]
local session, now, default_ttl_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local state, run, id, tenant, schema, created, ttl_s =
  unpack(redis.call('HMGET', session, 'state', 'run', 'id', 'tenant', 'schema', 'created', 'ttl_s'))
if not state then return {'missing'} end
if state ~= 'deleted' then
  local ttl_ms = ttl_s and tonumber(ttl_s) * 1000 or default_ttl_ms
  redis.call('UNLINK', unpack(KEYS))
  redis.call('HSET', session, 'id', id, 'tenant', tenant, 'schema', schema, 'state', 'deleted',
    'created', created, 'updated', now)
  if run then redis.call('HSET', session, 'run', run) end
  redis.call('PEXPIRE', session, ttl_ms > 0 and ttl_ms or tonumber(ARGV[3]))
end
return {'deleted', run or ''}
