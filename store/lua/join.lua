#!lua flags=allow-oom
--[[
What became of an attempt that a client waits for. While it runs, the asking is left behind for its worker to see.

KEYS  1 session  2 links  3 attempts
ARGV  1 attempt  2 request hash
Result  "deleted" (the session) "committed" "running" "gone"
]]
local session, links, attempts = unpack(KEYS)
local attempt = ARGV[1]
if redis.call('HGET', session, 'state') == 'deleted' then return 'deleted' end
if redis.call('HEXISTS', links, attempt) == 1 then return 'committed' end
local running = redis.call('HGET', attempts, ARGV[2]) or ''
if not string.find(' ' .. running, ' ' .. attempt .. ' ', 1, true) then return 'gone' end
redis.call('HINCRBY', attempts, 'waits:' .. attempt, 1)
return 'running'
