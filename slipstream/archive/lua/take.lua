-- Leases jobs. Arguments: worker, number of the call, limit, '1' if a suspect may be among them.
-- A call of the same number again gives the same leases again: the answer to the first may have been lost.
-- Answers: the leases; and what became of jobs whose lease had expired: id, batch, worker, crashes, state.
local worker, call, limit, may_suspect = arg(1), tonumber(arg(2)), tonumber(arg(3)), arg(4) == '1'
local out, taken, expired = {}, {}, {}
local TURNS = { 'high', 'normal', 'high', 'high', 'normal', 'high', 'low', 'high', 'normal', 'high' }
local MAX_DROPS, MAX_EXPIRED, MAX_DUE = 500, 100, 100
local LONGEST_DELAY = 10 * 60 * 1000 -- no worker has a job wait for longer

local shared = {}

local function shared_by(batch)
  shared[batch] = shared[batch] or redis.call('HMGET', batch_key(batch), 'options', 'options_sha256')
  return shared[batch]
end

local function look_up(id)
  local h = redis.call('HMGET', job_key(id), 'state', 'entry', 'batch', 'worker', 'epoch', 'custom', 'payload',
    'payload_sha256', 'attempts', 'crashes', 'trace', 'cost', 'progress')
  return { id = id, state = h[1], entry = h[2], batch = h[3], worker = h[4], epoch = h[5], custom = h[6], payload = h[7],
    digest = h[8], attempts = h[9], crashes = h[10], trace = h[11], cost = h[12], progress = h[13] }
end

local function show(job)
  local options = shared_by(job.batch)
  taken[#taken + 1] = job.id .. ' ' .. job.epoch
  out[#out + 1] = { job.id, job.batch, job.custom or '', job.epoch, job.payload or '', job.digest or '',
    options[1] or '', options[2] or '', job.attempts, job.crashes, job.entry, owner_of(job.batch), job.trace or '' }
end

local leased = {}

-- A run of the job begins, which has this entry.
local function begin(job)
  local name = split(job.entry)
  job.epoch = string.format('%d', job.epoch + 1)
  move(job.id, job.batch, job.state, 'running', 'epoch', job.epoch, 'worker', worker, 'started', now)
  if job.progress then redis.call('HDEL', job_key(job.id), 'progress') end
  if string.find(name, ':', 1, true) and not leased[name] then redis.call('ZADD', P .. 'leased', 0, name) end
  leased[name] = true
  show(job)
end

local function repeat_call(leases)
  for id, epoch in string.gmatch(leases, '(%S+) (%S+)') do
    local job = look_up(id)
    if job.worker == worker and job.epoch == epoch and job.state == 'running' then
      renew(job.entry)
      show(job)
    end
  end
end

-- One whose lease was not renewed. It runs again at once, unless it is a suspect, or was one until it got on: those wait
-- for their turn.
local function expire(id, entry)
  local job = look_up(id)
  if job.state ~= 'running' or job.entry ~= entry then return drop(entry) end
  if is_cancelled(job.batch) then
    move(id, job.batch, 'running', 'cancelled')
    return drop(entry)
  end
  local lost_by = job.worker
  local crashes = tonumber(job.crashes)
  if not (is_alive(lost_by) and is_absolved(id)) then crashes = blame(id, suspect_of(lost_by)) end
  if crashes > tonumber(job.crashes) then remember_death(id, lost_by, job.epoch) end
  job.crashes = crashes
  if redis.call('GET', P .. 'suspect') == id then redis.call('PEXPIRE', P .. 'suspect', LEASE) end
  if crashes < SUSPECT_AFTER and split(entry) ~= 'suspects' then
    renew(entry)
    begin(job)
  else
    if crashes >= MAX_CRASHES then
      bury(id, job.batch, 'running', 'whatever ran it died ' .. crashes .. ' times', 'ABORTED')
    else
      give_back(id, job.batch, 0)
    end
    drop(entry)
  end
  expired[#expired + 1] = { id, job.batch, lost_by, crashes, redis.call('HGET', job_key(id), 'state') }
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

-- Entries of a stream that are yet to be delivered. Nothing is put there once deliveries have begun.
local left = {}

local function has_left(name)
  left[name] = left[name] or num_waiting(name)
  return left[name] > 0
end

-- One job of the stream, if there is any.
local function deliver(name)
  while drops < MAX_DROPS and has_left(name) do
    left[name] = left[name] - 1
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', 1, 'STREAMS', stream_key(name), '>')
    if not read then return false end
    local found = read[1][2][1]
    local job, entry = look_up(found[2][2]), name .. ' ' .. found[1]
    local waits = job.state == 'queued' and job.entry == entry
    if waits and not is_cancelled(job.batch) then
      begin(job)
      return job
    end
    if waits then move(job.id, job.batch, 'queued', 'cancelled') end
    drop(entry)
    drops = drops + 1
  end
  return false
end

-- One suspect at a time over all workers: they may share what it kills.
local function deliver_suspect()
  local stream = stream_key('suspects')
  write_drops() -- one may have been among them
  if redis.call('EXISTS', stream) == 0 or redis.call('XPENDING', stream, GROUP)[1] > 0 then return end
  local job = deliver('suspects')
  if job then
    redis.call('SET', P .. 'w:' .. worker, job.id, 'PX', DAY)
    redis.call('SET', P .. 'suspect', job.id, 'PX', DAY)
  end
end

local has_debts = redis.call('EXISTS', P .. 'debts') == 1

local function owe(priority, owner, turns)
  has_debts = true
  local field = priority .. ':' .. owner
  if redis.call('HINCRBY', P .. 'debts', field, turns) <= 0 then redis.call('HDEL', P .. 'debts', field) end
end

-- By priority, the one owner that has work, or false for nobody. Nobody else lines up while deliveries go on.
local alone = {}

local function first_in_line(priority)
  if alone[priority] == nil then
    local owners = redis.call('ZRANGE', turns_key(priority), 0, 1)
    if #owners == 2 then return owners[1] end
    alone[priority] = owners[1] or false
  end
  return alone[priority]
end

-- Deficit round robin, paid afterwards: whose turn it is among those with work. A job costs one turn or more; who owes
-- turns is passed over as often, but when all do, what the least indebted owes is forgiven to all.
local function next_owner(priority)
  if not has_debts then return first_in_line(priority) end
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
    local again, waiting = again_name(priority, owner), waiting_name(priority, owner)
    local job = deliver(again) or deliver(waiting)
    if not has_left(again) and not has_left(waiting) then
      redis.call('ZREM', turns_key(priority), owner)
      if alone[priority] == owner then alone[priority] = false end
    elseif job and alone[priority] ~= owner then
      to_the_end(priority, owner, 'XX')
    end
    if job then
      local cost = tonumber(job.cost or 1)
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

local may_expire = hear()
if limit <= 0 then
  show_alive(worker)
  return { out, expired }
end
local before = redis.call('HMGET', P .. 't:' .. worker, 'call', 'leases')
if call < tonumber(before[1] or -1) then return { out, expired } end
if call == tonumber(before[1] or -1) then
  repeat_call(before[2])
  return { out, expired }
end

local function enqueue_due(from, to)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'delayed', from, to, 'LIMIT', 0, MAX_DUE)) do
    redis.call('ZREM', P .. 'delayed', id)
    enqueue(id, true)
  end
end

enqueue_due('-inf', now)
enqueue_due(now + LONGEST_DELAY, '+inf') -- the clock was ahead then
if may_expire then
  for _, name in ipairs(streams_with_leases()) do reclaim(name) end
end
show_alive(worker) -- this call shows nothing of what it was before
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
