--[[
Everything a request needs to know of a session, in one call, and the lease under which it may be generated.

No shebang: so a full or read-only server refuses the lease, the only thing that is written, and not the reading.

KEYS  1 session  2 links  3 turns  4 tokens  5 index  6 requests  7 attempts  8 delivered
ARGV  1 rendering signature  2 request hash  3 idempotency field or ""
      4 turn whose lineage is wanted, or "" for that of the turn which `splice.locate` is expected to choose
      5 chain hashes, shallowest first, in one string: 24 characters each, of which the first 22 are the field
      6 attempt, "" to be told the verdict and write nothing  7 its worker
      8 mark: "none", "retry", "key"; "asked" to replay or do nothing  9 TTL of `attempts` in ms
     10 number of hints, 11 of generation digests, 12 of turns that the caller has cached, 13 of workers that are gone,
      then these lists one after another; hints strongest first
Result
  1 the session's fixed fields: name, value, name, value ...; empty when there is no session
  2 candidates {depth, turn, link line, root fact}, from the deepest conversation up to and including the
    first that has a turn of the wanted signature: nothing shallower can be chosen
  3 earlier turns of an equal request: turn, extended, turn, extended ...
  4 the value under the idempotency field, or nil
  5 the hints that this session lacks
  6 the lineage {turn, link line, record, root fact, cached turn it starts after or "", lengths, chunk, chunk ...}
    or {} for none; a lost ancestor ends it with {turn, ""}
  7 the verdict: {"generate", worker ...}: leased, unless one of these workers, whose turns are not known to be
    delivered, is gone; {"replay", turn} {"join", attempt, worker} {"mismatch"}; where a worker is gone, ask again

A turn's line is read, never its record. Cached turns only count when they still have a line, so a server that lost
data is noticed here. The call may be repeated for ever: an attempt knows its lease, and a replay its claim.
]]
local session, links, turns, tokens, index, requests, attempts, delivered = unpack(KEYS)
local signature, request, idempotency, wanted, chain = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local attempt, worker, mark, lease_ttl_ms = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local NOTHING = '%'
local FIXED = {
  'id', 'tenant', 'schema', 'state', 'created', 'updated', 'run', 'group', 'group_size', 'metadata',
  'sampling_params', 'ttl_s', 'on_rendering_change', 'on_overflow', 'thinking', 'parent_session', 'unnamed',
  'model', 'turns', 'tokens', 'sampled_tokens', 'last_turn', 'status', 'reward',
}

local at = 13
local function list(count)
  local items = {}
  for i = 1, tonumber(count) do items[i] = ARGV[at + i] end
  at = at + #items
  return items
end
local function set(items)
  local members = {}
  for _, item in ipairs(items) do members[item] = true end
  return members
end
local hints = list(ARGV[10])
local digests, cached, gone = set(list(ARGV[11])), set(list(ARGV[12])), set(list(ARGV[13]))

local function parse(line)
  local words = {}
  for word in string.gmatch(line, '%S+') do words[#words + 1] = word end
  return {
    extended = words[1], order = tonumber(words[2]), parent = words[3], root = words[4],
    n_delta = words[7], delta = words[8], n_generated = words[9], digest = words[10],
  }
end

local function root_fact(turn, link)
  return redis.call('HGET', session, 'root:' .. (link.root == NOTHING and turn or link.root)) or ''
end

local function fixed_fields()
  local values, flat = redis.call('HMGET', session, unpack(FIXED)), {}
  for i, name in ipairs(FIXED) do
    if values[i] then
      flat[#flat + 1] = name
      flat[#flat + 1] = values[i]
    end
  end
  return flat
end

local acts, state = attempt ~= '', redis.call('HGET', session, 'state')

local function candidates()
  local found, equal = {}, {}
  if not state then return found, equal end -- what an expired session left behind is nobody's
  for depth = #chain / 24, 1, -1 do
    local field = string.sub(chain, depth * 24 - 23, depth * 24 - 2)
    for turn in string.gmatch(redis.call('HGET', index, field) or '', '%S+') do
      local line = redis.call('HGET', links, turn)
      if line then
        local link = parse(line)
        local fact = root_fact(turn, link)
        found[#found + 1] = {depth, turn, line, fact}
        if string.sub(fact, 1, #signature + 1) == signature .. ' ' then
          equal[#equal + 1] = {turn = turn, link = link}
        end
      end
    end
    if #equal > 0 then break end
  end
  return found, equal
end

-- The tie rule of `splice.locate`; a wrong guess costs the caller one more call.
local function expected(equal)
  local narrowed = {}
  for _, one in ipairs(equal) do
    if digests[one.link.digest] then narrowed[#narrowed + 1] = one end
  end
  if #narrowed > 0 then equal = narrowed end
  for _, hint in ipairs(hints) do
    for _, one in ipairs(equal) do
      if one.turn == hint then return one.turn end
    end
  end
  local best
  for _, one in ipairs(equal) do
    local link = one.link
    if not best or link.extended < best.link.extended
      or (link.extended == best.link.extended and link.order > best.link.order) then
      best = one
    end
  end
  return best and best.turn or ''
end

local found, equal = candidates()
local parent = expected(equal)

-- Turns that answered this very request: rendered whole, or after the same parent. The same words after another turn
-- that looks equal are another request.
local function answers()
  local flat = {}
  for turn in string.gmatch(state and redis.call('HGET', requests, request) or '', '%S+') do
    local line = redis.call('HGET', links, turn)
    local after = line and parse(line).parent
    if after == NOTHING or after == parent then flat[#flat + 1] = {turn, line} end
  end
  return flat
end

local function earlier()
  local flat = {}
  for _, answer in ipairs(answers()) do
    flat[#flat + 1] = answer[1]
    flat[#flat + 1] = string.sub(answer[2], 1, 1)
  end
  return flat
end

local function unknown()
  local lacking = {}
  for first = 1, #hints, 1000 do
    local last = math.min(first + 999, #hints)
    for i, line in ipairs(redis.call('HMGET', links, unpack(hints, first, last))) do
      if not (state and line) then lacking[#lacking + 1] = hints[first + i - 1] end
    end
  end
  return lacking
end

local function lineage(head)
  local head_line = head ~= '' and redis.call('HGET', links, head)
  if not head_line then return {} end
  local lengths, chunks, turn, line = {}, {}, head, head_line
  while turn ~= NOTHING and not cached[turn] do
    local link = parse(line)
    if link.n_generated ~= '0' then
      lengths[#lengths + 1] = link.n_generated
      chunks[#chunks + 1] = redis.call('HGET', tokens, turn)
    end
    if link.n_delta ~= '0' then
      lengths[#lengths + 1] = link.n_delta
      chunks[#chunks + 1] = redis.call('HGET', tokens, link.delta)
    end
    turn = link.parent
    if turn ~= NOTHING then
      line = redis.call('HGET', links, turn)
      if not line then return {turn, ''} end
    end
  end
  local answer = {
    head, head_line, redis.call('HGET', turns, head) or '', root_fact(head, parse(head_line)),
    turn == NOTHING and '' or turn, '',
  }
  for i = #chunks, 1, -1 do answer[#answer + 1] = chunks[i] end
  for i = 1, math.floor(#lengths / 2) do
    lengths[i], lengths[#lengths + 1 - i] = lengths[#lengths + 1 - i], lengths[i]
  end
  answer[6] = table.concat(lengths, ' ')
  return answer
end

-- The verdict: DESIGN's table of retries, in the order of preference.

local function running(field)
  local pairs_, text = {}, redis.call('HGET', attempts, field) or ''
  for id, by in string.gmatch(text, '(%S+) (%S+)') do pairs_[#pairs_ + 1] = {id = id, worker = by} end
  return pairs_
end

local function generate(suspects)
  if acts and mark ~= 'asked' and state ~= 'deleted' and state ~= 'finished'
    and redis.call('HEXISTS', attempts, 'taken:' .. attempt) == 0 then
    local mine, others = attempt .. ' ' .. worker, redis.call('HGET', attempts, request)
    if not others or not string.find(' ' .. others .. ' ', ' ' .. mine .. ' ', 1, true) then
      redis.call('HSET', attempts, request, others and others .. ' ' .. mine or mine)
    end
    if idempotency ~= '' then redis.call('HSET', attempts, idempotency, mine .. ' ' .. request) end
    if redis.call('PTTL', attempts) == -1 then
      local left = redis.call('PTTL', session)
      redis.call('PEXPIRE', attempts, left > 0 and left or lease_ttl_ms)
    end
  end
  return {'generate', unpack(suspects or {})}
end

local function join(held)
  if acts then redis.call('HINCRBY', attempts, 'waits:' .. held.id, 1) end
  return {'join', held.id, held.worker}
end

local function take_over(lost, field)
  if not acts then return end
  local left = {}
  for _, one in ipairs(running(field)) do
    if one.id ~= lost.id then left[#left + 1] = one.id .. ' ' .. one.worker end
  end
  if #left > 0 then
    redis.call('HSET', attempts, field, table.concat(left, ' '))
  else
    redis.call('HDEL', attempts, field)
  end
  redis.call('HDEL', attempts, 'waits:' .. lost.id)
  redis.call('HSET', attempts, 'taken:' .. lost.id, attempt)
end

local function by_key()
  local answered = state and redis.call('HGET', requests, idempotency)
  if answered then
    local turn, asked = string.match(answered, '^(%S+) (%S+)')
    return asked == request and {'replay', turn} or {'mismatch'}
  end
  local id, by, asked = string.match(redis.call('HGET', attempts, idempotency) or '', '^(%S+) (%S+) (%S+)')
  -- The field outlives an attempt that was taken over without its key, so its lease is what counts.
  for _, held in ipairs(id and running(asked) or {}) do
    if held.id == id and id ~= attempt then
      if not gone[by] then return asked == request and join(held) or {'mismatch', by} end
      take_over(held, asked)
    end
  end
  return generate()
end

-- A claimed turn is being delivered: the next unmarked repeat is another sample. It is a courtesy; a full server's
-- refusal must not withhold the reply.
local function replay(turn, claimed)
  if acts and claimed then redis.pcall('HSET', delivered, turn, worker .. ' ' .. attempt) end
  return {'replay', turn}
end

local function committed()
  local unread, undecided, untouched, suspects = nil, nil, nil, {}
  for _, answer in ipairs(answers()) do
    local turn, line = unpack(answer)
    local by, claim = string.match(redis.call('HGET', delivered, turn) or '', '^(%S+) ?(%S*)')
    if by and (by == '0' or gone[by] or (acts and claim == attempt)) then
      unread = turn
    elseif by then
      undecided = turn
      if by ~= worker then suspects[#suspects + 1] = by end
    elseif string.sub(line, 1, 1) == '0' then
      untouched = turn
    end
  end
  return unread, undecided, untouched, suspects
end

local function by_request()
  local unread, undecided, untouched, suspects = committed()
  if unread then return replay(unread, true) end
  if mark ~= 'retry' then return generate(suspects) end
  if undecided then return replay(undecided) end
  local live, lost
  for _, one in ipairs(running(request)) do
    if one.id ~= attempt then
      if gone[one.worker] then lost = one else live = one end
    end
  end
  if live then return join(live) end
  if lost then
    take_over(lost, request)
  elseif untouched then
    return replay(untouched)
  end
  return generate()
end

return {
  fixed_fields(),
  found,
  earlier(),
  state and idempotency ~= '' and redis.call('HGET', requests, idempotency),
  unknown(),
  lineage(wanted ~= '' and wanted or parent),
  request ~= '' and (mark == 'key' and by_key() or by_request()) or {},
}
