#!lua flags=allow-oom
--[[
Ends an attempt that commits nothing. Fenced, it cannot commit or be leased later either: for when a command of its
own may still be on its way.

KEYS  1 attempts
ARGV  1 attempt  2 request hash  3 idempotency field or ""  4 "1" to fence  5 TTL of `attempts` in ms
Result  nil
]]
local attempts = KEYS[1]
local attempt, request, idempotency = ARGV[1], ARGV[2], ARGV[3]
local left, held = {}, false
for id, worker in string.gmatch(redis.call('HGET', attempts, request) or '', '(%S+) (%S+)') do
  if id == attempt then held = true else left[#left + 1] = id .. ' ' .. worker end
end
if held then
  if #left > 0 then
    redis.call('HSET', attempts, request, table.concat(left, ' '))
  else
    redis.call('HDEL', attempts, request)
  end
end
redis.call('HDEL', attempts, 'waits:' .. attempt)
if idempotency ~= '' and string.match(redis.call('HGET', attempts, idempotency) or '', '^%S+') == attempt then
  redis.call('HDEL', attempts, idempotency)
end
if ARGV[4] == '1' then
  redis.call('HSETNX', attempts, 'taken:' .. attempt, '%')
  if redis.call('PTTL', attempts) == -1 then redis.call('PEXPIRE', attempts, ARGV[5]) end
end
