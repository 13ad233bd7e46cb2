#!lua flags=allow-oom
--[[
Notes which turns were delivered, many at once; on a cluster, those of one slot. Delivered is final.

KEYS  the `delivered` of each turn's tree
ARGV  turn, "1" delivered or "0" not, turn, ...
Result  nil
]]
for i, delivered in ipairs(KEYS) do
  local turn, was = ARGV[2 * i - 1], ARGV[2 * i]
  if was == '1' then
    redis.call('HDEL', delivered, turn)
  elseif redis.call('HEXISTS', delivered, turn) == 1 then
    redis.call('HSET', delivered, turn, '0')
  end
end
