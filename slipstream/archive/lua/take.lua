-- Leases jobs. Arguments: worker, number of the call, limit, '1' if a suspect may be among them.
-- A call of the same number again gives the same leases again: the answer to the first may have been lost.
-- Answers: the leases; and what became of jobs whose lease had expired: id, batch, worker, crashes, state.
local worker, call, limit, may_suspect = arg(1), tonumber(arg(2)), tonumber(arg(3)), arg(4) == '1'
local out, taken, expired = {}, {}, {}
local TURNS = { 'high', 'normal', 'high', 'high', 'normal', 'high', 'low', 'high', 'normal', 'high' }
local MAX_DROPS, MAX_EXPIRED, MAX_DUE = 500, 100, 100

local shared = {}

local function shared_by(batch)
  shared[batch] = shared[batch] or redis.call('HMGET', batch_key(batch), 'options', 'options_sha256', 'owner')
  return shared[batch]
end

local function show(id, batch, entry)
  local h = redis.call('HMGET', job_key(id), 'custom', 'epoch', 'payload', 'payload_sha256', 'attempts', 'crashes',
    'trace')
  local b = shared_by(batch)
  taken[#taken + 1] = id .. ' ' .. h[2]
  out[#out + 1] = { id, batch, h[1] or '', h[2], h[3] or '', h[4] or '', b[1] or '', b[2] or '', h[5], h[6],
    entry, b[3] or '', h[7] or '' }
end

local function begin(id, batch, state, entry)
  redis.call('HINCRBY', job_key(id), 'epoch', 1)
  redis.call('HSET', job_key(id), 'worker', worker, 'started', now, 'entry', entry)
  redis.call('HDEL', job_key(id), 'progress')
  local name = split(entry)
  if string.find(name, ':', 1, true) then redis.call('ZADD', P .. 'leased', 0, name) end
  if state ~= 'running' then move(id, batch, state, 'running') end
  show(id, batch, entry)
end

local function repeat_call(leases)
  for id, epoch in string.gmatch(leases, '(%S+) (%S+)') do
    local same, state, batch, entry = holder(id, worker, epoch)
    if same and state == 'running' then
      renew(entry)
      show(id, batch, entry)
    end
  end
end

-- One whose lease was not renewed. It runs again at once, unless it is a suspect, or was one until it got on: those wait
-- for their turn.
local function expire(id, entry)
  local h = redis.call('HMGET', job_key(id), 'state', 'entry', 'batch', 'worker')
  if h[1] ~= 'running' or h[2] ~= entry then return drop(entry) end
  if is_cancelled(h[3]) then
    drop(entry)
    return move(id, h[3], 'running', 'cancelled')
  end
  local crashes = blame(id, suspect_of(h[4]))
  if redis.call('GET', P .. 'suspect') == id then redis.call('PEXPIRE', P .. 'suspect', LEASE) end
  if crashes < SUSPECT_AFTER and split(entry) ~= 'suspects' then
    renew(entry)
    begin(id, h[3], 'running', entry)
  else
    drop(entry)
    if crashes >= MAX_CRASHES then
      bury(id, h[3], 'running', 'whatever ran it died ' .. crashes .. ' times', 'ABORTED')
    else
      give_back(id, h[3], 0)
    end
  end
  expired[#expired + 1] = { id, h[3], h[4], crashes, redis.call('HGET', job_key(id), 'state') }
end

local function reclaim(name)
  local stream = stream_key(name)
  if redis.call('EXISTS', stream) == 0 then return end
  for _, pending in ipairs(redis.call('XPENDING', stream, GROUP, 'IDLE', LEASE, '-', '+', MAX_EXPIRED)) do
    if #out >= limit then return end
    local found = redis.call('XRANGE', stream, pending[1], pending[1])
    expire(found[1][2][2], name .. ' ' .. pending[1])
  end
end

local drops = 0

-- One job of the stream, if any: whether there was one.
local function deliver(name)
  local stream = stream_key(name)
  while drops < MAX_DROPS and redis.call('EXISTS', stream) == 1 do
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', 1, 'STREAMS', stream, '>')
    if not read then return false end
    local id, entry = read[1][2][1][2][2], name .. ' ' .. read[1][2][1][1]
    local h = redis.call('HMGET', job_key(id), 'state', 'entry', 'batch')
    local waits = h[1] == 'queued' and h[2] == entry
    if waits and not is_cancelled(h[3]) then
      begin(id, h[3], 'queued', entry)
      return id
    end
    drop(entry)
    if waits then move(id, h[3], 'queued', 'cancelled') end
    drops = drops + 1
  end
  return false
end

-- One suspect at a time over all workers: they may share what it kills.
local function deliver_suspect()
  local stream = stream_key('suspects')
  if redis.call('EXISTS', stream) == 0 or redis.call('XPENDING', stream, GROUP)[1] > 0 then return end
  local id = deliver('suspects')
  if id then
    redis.call('SET', P .. 'w:' .. worker, id, 'PX', DAY)
    redis.call('SET', P .. 'suspect', id, 'PX', DAY)
  end
end

local function owe(priority, owner, turns)
  local field = priority .. ':' .. owner
  if redis.call('HINCRBY', P .. 'debts', field, turns) <= 0 then redis.call('HDEL', P .. 'debts', field) end
end

-- Deficit round robin, paid afterwards: whose turn it is among those with work. A job costs one turn or more; who owes
-- turns is passed over as often, but when all do, what the least indebted owes is forgiven to all.
local function next_owner(priority)
  if redis.call('EXISTS', P .. 'debts') == 0 then return redis.call('ZRANGE', turns_key(priority), 0, 0)[1] end
  local owners, debts, least = redis.call('ZRANGE', turns_key(priority), 0, -1), {}, math.huge
  for i, owner in ipairs(owners) do
    debts[i] = tonumber(redis.call('HGET', P .. 'debts', priority .. ':' .. owner) or 0)
    least = math.min(least, debts[i])
  end
  for i, owner in ipairs(owners) do
    if least > 0 then owe(priority, owner, -least) end
    debts[i] = debts[i] - least
  end
  for i, owner in ipairs(owners) do
    if debts[i] == 0 then return owner end
    owe(priority, owner, -1)
    to_the_end(priority, owner, 'XX')
  end
end

local function deliver_from(priority)
  while drops < MAX_DROPS do
    local owner = next_owner(priority)
    if not owner then return false end
    local id = deliver(again_name(priority, owner)) or deliver(waiting_name(priority, owner))
    if not has_waiting(priority, owner) then
      redis.call('ZREM', turns_key(priority), owner)
    elseif id then
      to_the_end(priority, owner, 'XX')
    end
    if id then
      local cost = tonumber(redis.call('HGET', job_key(id), 'cost') or 1)
      if cost > 1 then owe(priority, owner, cost - 1) end
      return true
    end
  end
  return false
end

local turn = tonumber(redis.call('HGET', P .. 'clock', 'turn') or 0)

local function deliver_in_turn()
  if deliver('again') then return true end
  for _, priority in ipairs({ TURNS[turn % #TURNS + 1], unpack(PRIORITIES) }) do
    if deliver_from(priority) then
      turn = (turn + 1) % #TURNS
      return true
    end
  end
  return false
end

-- Streams that may have leases: those of the layout of 0.2, and owners' streams.
local function leased()
  local names = { 'suspects', 'again', unpack(PRIORITIES) }
  for _, name in ipairs(redis.call('ZRANGE', P .. 'leased', 0, -1)) do names[#names + 1] = name end
  return names
end

local may_expire = hear()
if limit <= 0 then return { out, expired } end
local before = redis.call('HMGET', P .. 't:' .. worker, 'call', 'leases')
if call < tonumber(before[1] or -1) then return { out, expired } end
if call == tonumber(before[1] or -1) then
  repeat_call(before[2])
  return { out, expired }
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', '-inf', now, 'LIMIT', 0, MAX_DUE)) do
  redis.call('ZREM', P .. 'delayed', id)
  enqueue(id, true)
end
if may_expire then
  for _, name in ipairs(leased()) do reclaim(name) end
end
for _, priority in ipairs(PRIORITIES) do -- what an earlier release put there has no turn yet
  if num_waiting(priority) > 0 then to_the_end(priority, '', 'NX') end
end
if may_suspect and #out < limit then deliver_suspect() end
while #out < limit and deliver_in_turn() do end

if #out > 0 then
  redis.call('HSET', P .. 'clock', 'turn', turn)
  redis.call('HSET', P .. 't:' .. worker, 'call', call, 'leases', table.concat(taken, ' '))
  redis.call('PEXPIRE', P .. 't:' .. worker, DAY)
end
return { out, expired }
