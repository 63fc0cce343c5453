-- Goes ahead of every other script: the keys, the clock, and the only functions that change a job's state.
--
--   j:<job>      hash: the job                        b:<batch>       hash: the batch, n:<state> and t:<tally> its sums
--   b:<batch>:jobs  list of its job ids, in order     batches, o:<owner>  zsets of batch ids by creation
--   s:<name>     streams of job ids, one group, one consumer: `suspects`; for each owner `<priority>:<owner>` and
--                `again:<priority>:<owner>` for what was given back. An entry is pending while the job runs, and its
--                idle time is the age of the lease. An empty stream is deleted. `high`, `normal`, `low` are those of
--                the owner '': until 0.2 of all owners, as `again` was for all.
--   turns:<priority>  zset of owners with work by turn   debts        hash: turns that <priority>:<owner> is to miss
--   leased       zset of owners' streams with leases
--   delayed      zset of job ids by due time          dead            zset of job ids by time of death
--   expiry       zset of batch ids by time            r:<content key> id of a job that has this result
--   w:<worker>   the suspect it runs                  t:<worker>      its latest take, so that it can be repeated
--   a:<worker>   is there for half a lease behind each take and beat of it
--   suspect      the suspect that runs anywhere       totals, clock   hashes: jobs by state and bytes of parts; times,
--                turn, last place
--   p:<job>, d:<job>, m:<job>  of a job with parts: hash of the parts by number, each behind its digest; zset of the
--                numbers that are there; hash: what they depend on, total, layout, bytes, t:<tally>. Beside the
--                parts lie notes as n:<name>; `notes` of the last hash has their names, `note_bytes` what of `bytes` is
--                theirs. A batch has the sums p:total, p:done, p:bytes of its jobs, and p:idle of those that failed
--   k:<set>      stream of captions with the fingerprints of their videos, for near-duplicates
--
-- Where results leave the store (BUDGET > 0) there are also:
--   b:<batch>:ended   list of '<position> <job>' to be written into result files, in the order they ended; `plan` of the
--                batch says '<number of the file> <how many of them>', `freeing` how many are written but still here
--   b:<batch>:files   list of the result files         b:<batch>:outside  a bit for each position that is in one of them
--   b:<batch>:names   hash of jobs that have no record here, 12 bytes each: 8 of the id, 4 of the payload's digest; the
--                field is the first four digits of the id
--   b:<batch>:where   hash: positions of jobs with parts that are in result files
--   contents          hash of results that are in result files, by content key, 14 bytes each: 6 of the key, 4 the number
--                of the batch, 4 the position; the field is the first four digits of the key. `filed`: hash of batches by
--                their numbers; an entry whose batch is not in it any more counts for nothing
--   b:<batch>:chunks  list of '<object> <jobs> <mask>' of jobs that wait outside, `chunked` of the batch their number
--   ended, chunks     zsets of batches that have such lists, by time and by turn
--   chunked           hash: jobs that wait outside by owner
--   compactor, feeder '<gateway> <time>': who does it now, since it last said so
local P = KEYS[1]
local LEASE, MAX_ATTEMPTS, MAX_CRASHES = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local MAX_BACKLOG, RETENTION = tonumber(ARGV[4]), tonumber(ARGV[5])
local BUDGET = tonumber(ARGV[6])
local FIRST_ARG = 6
local GROUP, CONSUMER = 'workers', 'any'
local SUSPECT_AFTER = 2
local DAY = 86400000
local PRIORITIES = { 'high', 'normal', 'low' }

local T = redis.call('TIME')
local now = T[1] * 1000 + math.floor(T[2] / 1000) -- ms

local function arg(i) return ARGV[FIRST_ARG + i] end
local function num_args() return #ARGV - FIRST_ARG end
local function job_key(id) return P .. 'j:' .. id end
local function batch_key(id) return P .. 'b:' .. id end
local function jobs_key(id) return P .. 'b:' .. id .. ':jobs' end
local function stream_key(name) return P .. 's:' .. name end
local function parts_key(id) return P .. 'p:' .. id end
local function done_key(id) return P .. 'd:' .. id end
local function meta_key(id) return P .. 'm:' .. id end
local function note_field(name) return 'n:' .. name end
local function ended_key(id) return P .. 'b:' .. id .. ':ended' end
local function outside_key(id) return P .. 'b:' .. id .. ':outside' end
local function names_key(id) return P .. 'b:' .. id .. ':names' end
local function chunks_key(id) return P .. 'b:' .. id .. ':chunks' end
local function is_live(state) return state == 'queued' or state == 'running' end


local function waiting_name(priority, owner) return owner == '' and priority or priority .. ':' .. owner end
local function again_name(priority, owner) return 'again:' .. priority .. ':' .. owner end
local function turns_key(priority) return P .. 'turns:' .. priority end

-- A script asks often, and changes neither before it has asked for the last time.
local flags = {}

local function flags_of(batch)
  if not flags[batch] then flags[batch] = redis.call('HMGET', batch_key(batch), 'owner', 'cancel') end
  return flags[batch]
end

local function owner_of(batch) return flags_of(batch)[1] or '' end
local function is_cancelled(batch) return flags_of(batch)[2] == '1' end

-- An entry is '<stream name> <id>'.
local function split(entry) return string.match(entry, '^(.*) (%S+)$') end

-- What is kept back until the script ends, so that one that moves a hundred jobs changes every sum and list once: what is
-- added to sums, by key and field; what is appended to lists; entries that are over, by stream; batches that have jobs
-- for result files, or of which jobs came to life or ended. `settle` writes it, also of a script that fails midway: so
-- whatever follows from a job's new state is put here once the job has it.
local sums, stored, lists, dropped, ended, changed = {}, {}, {}, {}, {}, {}

local function of(all, key)
  if not all[key] then all[key] = {} end
  return all[key]
end

local function add(key, field, by)
  local fields = of(sums, key)
  fields[field] = (fields[field] or 0) + by
end

-- As it will be when the script has ended.
local function sum(key, field)
  local fields = of(stored, key)
  if not fields[field] then fields[field] = tonumber(redis.call('HGET', key, field) or 0) end
  return fields[field] + (of(sums, key)[field] or 0)
end

local function append(key, value) table.insert(of(lists, key), value) end

local function drop(entry)
  local name, id = split(entry)
  table.insert(of(dropped, name), id)
end

local function write_drops()
  for name, ids in pairs(dropped) do
    local stream = stream_key(name)
    redis.call('XACK', stream, GROUP, unpack(ids))
    redis.call('XDEL', stream, unpack(ids))
    if redis.call('XLEN', stream) == 0 then
      redis.call('DEL', stream)
      redis.call('ZREM', P .. 'leased', name)
    end
    dropped[name] = nil
  end
end

local function renew(entry)
  local name, id = split(entry)
  redis.call('XCLAIM', stream_key(name), GROUP, CONSUMER, 0, id, 'JUSTID')
end

-- Entries that were not delivered, and those that were.
local function num_waiting(name)
  local length = redis.call('XLEN', stream_key(name))
  if length == 0 then return 0, 0 end
  local pending = redis.call('XPENDING', stream_key(name), GROUP)[1]
  return length - pending, pending
end

-- Streams that may have leases: those of the layout of 0.2, and owners' streams.
local function streams_with_leases()
  local names = { 'suspects', 'again', unpack(PRIORITIES) }
  for _, name in ipairs(redis.call('ZRANGE', P .. 'leased', 0, -1)) do names[#names + 1] = name end
  return names
end

-- How many more jobs of the owner may wait, of so many.
local function room_of(owner, quota)
  for _, priority in ipairs(PRIORITIES) do
    quota = quota - num_waiting(waiting_name(priority, owner)) - num_waiting(again_name(priority, owner))
  end
  if BUDGET > 0 then quota = quota - sum(P .. 'chunked', owner) end
  return quota
end

local function is_full(more)
  return sum(P .. 'totals', 'queued') + sum(P .. 'totals', 'chunked') + (more or 0) >= MAX_BACKLOG
end

local function to_the_end(priority, owner, only_if)
  redis.call('ZADD', turns_key(priority), only_if, redis.call('HINCRBY', P .. 'clock', 'place', 1), owner)
end

local function count(batch, state, by)
  add(batch_key(batch), 'n:' .. state, by)
  add(P .. 'totals', state, by)
end

local function num_live(batch)
  local n = redis.call('HMGET', batch_key(batch), 'n:queued', 'n:running', 'chunked')
  return tonumber(n[1] or 0) + tonumber(n[2] or 0) + tonumber(n[3] or 0)
end

local function keep_until_expiry(batch) redis.call('ZADD', P .. 'expiry', now + RETENTION, batch) end

-- What a job in this state takes here, about, and what of that is its result; its parts are counted by themselves.
local function job_bytes(id, state)
  local result = state == 'done' and redis.call('HSTRLEN', job_key(id), 'result') or 0
  return 500 + redis.call('HSTRLEN', job_key(id), 'payload') + result, result
end

local function parts_bytes(id) return tonumber(redis.call('HGET', meta_key(id), 'bytes') or 0) end

-- Of all jobs but those that failed, which stay until somebody retries them. Less than nothing is what releases counted
-- that took off what they had never added.
local function held_bytes()
  local bytes = sum(P .. 'totals', 'bytes')
  if bytes < 0 then add(P .. 'totals', 'bytes', -bytes) end
  return math.max(0, bytes) + sum(P .. 'totals', 'part_bytes') - sum(P .. 'totals', 'idle_part_bytes')
end

local function is_faulty(state) return state == 'failed' or state == 'dead' end

-- A job that is yet to be done counts with a result of usual size: when all of them are done there must be room for that.
local RESULT_BYTES = 4000

local function weight(state, bytes, result)
  if not state or is_faulty(state) then return 0 end
  return bytes + (is_live(state) and RESULT_BYTES - result or 0)
end

-- A job that is over for good is to be written into a result file.
local function put_aside(id, batch, at, bytes)
  append(ended_key(batch), at .. ' ' .. id)
  add(batch_key(batch), 'ended_bytes', bytes + parts_bytes(id))
  ended[batch] = true
end

-- Whether jobs are counted by what they take: where results leave the store, also for a gateway that was not told so yet,
-- or not any more. What it ends is to be written by those that were, and no longer to take room.
local is_weighed = BUDGET > 0 or nil

local function is_counted()
  if is_weighed == nil then is_weighed = redis.call('HGET', P .. 'totals', 'bytes') ~= false end
  return is_weighed
end

-- Of jobs that were handed in before results left the store nothing was counted.
local function weigh(id, batch, from, to)
  local at = redis.call('HGET', job_key(id), 'at')
  if not at then return end
  local bytes, result = job_bytes(id, to)
  add(P .. 'totals', 'bytes', weight(to, bytes, result) - weight(from, bytes, result))
  if to == 'done' or to == 'cancelled' then put_aside(id, batch, at, bytes) end
end

-- The parts of a job that failed are kept for whoever retries it, and take no room from others meanwhile. So many bytes.
local function set_idle(id, batch, bytes)
  local before = tonumber(redis.call('HGET', job_key(id), 'idle_part_bytes') or 0)
  if bytes == before then return end
  redis.call('HSET', job_key(id), 'idle_part_bytes', bytes)
  add(batch_key(batch), 'p:idle', bytes - before)
  add(P .. 'totals', 'idle_part_bytes', bytes - before)
end

-- The one place where a job's state changes. `from` is false for a new job; what follows it are fields that change, too.
local function move(id, batch, from, to, ...)
  if is_live(to) then
    redis.call('HSET', job_key(id), 'state', to, ...)
  else
    redis.call('HSET', job_key(id), 'state', to, 'ended', now, ...)
  end
  if from then count(batch, from, -1) end
  count(batch, to, 1)
  if from and is_live(from) and is_live(to) then return end
  if from and is_live(to) then redis.call('HDEL', job_key(id), 'ended') end
  changed[batch] = true
  if from == 'dead' then redis.call('ZREM', P .. 'dead', id) end
  if to == 'dead' then redis.call('ZADD', P .. 'dead', now, id) end
  if is_faulty(to) then set_idle(id, batch, parts_bytes(id)) elseif is_faulty(from) then set_idle(id, batch, 0) end
  if is_counted() then weigh(id, batch, from, to) end
end

-- One more field that changes.
local function put(fields, field, value)
  fields[#fields + 1] = field
  fields[#fields + 1] = value
end

-- Whether nothing of the batch waits or runs any more is known once all sums are written.
local function end_or_revive(batch)
  if num_live(batch) == 0 then
    redis.call('HSET', batch_key(batch), 'ended', now)
    keep_until_expiry(batch)
  else
    redis.call('HDEL', batch_key(batch), 'ended')
    redis.call('ZREM', P .. 'expiry', batch)
  end
end

-- Writes what was kept back. Where something of it is damaged, the rest is written none the less.
local function settle()
  local wrong
  local function attempt(step, ...)
    local ok, answer = pcall(step, ...)
    if not ok then wrong = wrong or answer end
  end
  attempt(write_drops)
  for key, values in pairs(lists) do attempt(redis.call, 'RPUSH', key, unpack(values)) end
  for key, fields in pairs(sums) do
    for field, by in pairs(fields) do
      local is_tally = string.sub(field, 1, 2) == 't:'
      if by ~= 0 or is_tally then attempt(redis.call, is_tally and 'HINCRBYFLOAT' or 'HINCRBY', key, field, by) end
    end
  end
  for batch in pairs(ended) do attempt(redis.call, 'ZADD', P .. 'ended', 'NX', now, batch) end
  for batch in pairs(changed) do attempt(end_or_revive, batch) end
  sums, stored, lists, dropped, ended, changed = {}, {}, {}, {}, {}, {}
  if wrong then error(wrong, 0) end
end

-- Appends a job to where it waits, and answers the entry. An owner that had nothing waiting comes after all who have.
local in_line, streams = {}, {}

local function line_up(id, batch, priority, crashes, is_again)
  local owner, name = owner_of(batch), 'suspects'
  if crashes < SUSPECT_AFTER then
    name = (is_again and again_name or waiting_name)(priority, owner)
    if not in_line[turns_key(priority) .. owner] then to_the_end(priority, owner, 'NX') end
    in_line[turns_key(priority) .. owner] = true
  end
  local stream = stream_key(name)
  if not streams[name] and redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  streams[name] = true
  return name .. ' ' .. redis.call('XADD', stream, '*', 'job', id)
end

-- Puts a job where it waits.
local function enqueue(id, is_again)
  local h = redis.call('HMGET', job_key(id), 'crashes', 'priority', 'batch')
  if h[3] then redis.call('HSET', job_key(id), 'entry', line_up(id, h[3], h[2], tonumber(h[1]), is_again)) end
end

-- The position of the batch's next job.
local function next_position(batch)
  local key = jobs_key(batch)
  local lengths = of(stored, 'lengths')
  if not lengths[key] then lengths[key] = redis.call('LLEN', key) end
  return sum(batch_key(batch), 'swept') + lengths[key] + #of(lists, key)
end

-- A new job; it has failed if there is a rejection.
local function add_job(batch, id, custom_id, priority, payload, digest, cost, rejection, code, trace)
  local fields = { 'batch', batch, 'custom', custom_id, 'priority', priority, 'payload', payload,
    'payload_sha256', digest, 'epoch', 0, 'attempts', 0, 'crashes', 0, 'created', now }
  if tonumber(cost) > 1 then put(fields, 'cost', cost) end
  if trace ~= '' then put(fields, 'trace', trace) end
  local position = next_position(batch)
  if BUDGET > 0 then put(fields, 'at', position) end
  if rejection ~= '' then
    put(fields, 'error', rejection)
    put(fields, 'code', code)
    move(id, batch, false, 'failed', unpack(fields))
  elseif is_cancelled(batch) then
    move(id, batch, false, 'cancelled', unpack(fields))
  else
    put(fields, 'entry', line_up(id, batch, priority, 0, false))
    move(id, batch, false, 'queued', unpack(fields))
  end
  append(jobs_key(batch), id)
end

local function bury(id, batch, from, why, code)
  move(id, batch, from, 'dead', 'error', why, 'code', code)
end

-- A running job goes back to wait, and why is told of it, and of its batch where that is an obstacle; one of a cancelled
-- batch ends here.
local function give_back(id, batch, delay, why, is_obstacle)
  if why then redis.call('HSET', job_key(id), 'error', why) end
  if is_cancelled(batch) then return move(id, batch, 'running', 'cancelled') end
  if is_obstacle then redis.call('HSET', batch_key(batch), 'obstacle', why, 'obstacle_at', now) end
  move(id, batch, 'running', 'queued')
  if delay > 0 then
    redis.call('HSET', job_key(id), 'entry', '')
    redis.call('ZADD', P .. 'delayed', now + delay, id)
  else
    enqueue(id, true)
  end
end

-- The parts of a job, and its notes, have so many bytes more.
local function grow_parts(id, batch, by)
  redis.call('HINCRBY', meta_key(id), 'bytes', by)
  add(batch_key(batch), 'p:bytes', by)
  add(P .. 'totals', 'part_bytes', by)
end

local function drop_parts(id, batch)
  local meta = redis.call('HMGET', meta_key(id), 'total', 'bytes')
  if not meta[1] then return end
  add(batch_key(batch), 'p:total', -meta[1])
  add(batch_key(batch), 'p:done', -redis.call('ZCARD', done_key(id)))
  add(batch_key(batch), 'p:bytes', -meta[2])
  add(P .. 'totals', 'part_bytes', -meta[2])
  redis.call('DEL', parts_key(id), done_key(id), meta_key(id))
end

-- Whether the lease's token is the job's current one; and the job's state, batch, entry, progress and latest error.
local function holder(id, worker, epoch)
  local h = redis.call('HMGET', job_key(id), 'worker', 'epoch', 'state', 'batch', 'entry', 'progress', 'error')
  local same = h[1] == worker and h[2] == epoch
  return same, h[3], h[4], h[5], h[6], h[7]
end

-- Suspects that run, by key; a script asks once.
local suspects = {}

local function suspect_at(key)
  if suspects[key] == nil then suspects[key] = redis.call('GET', key) end
  return suspects[key]
end

local function suspect_of(worker) return suspect_at(P .. 'w:' .. worker) end

-- The suspect has ended. After a crash its neighbours are yet to be heard of, so it is remembered for a lease.
local function forget_suspect(id, worker, crashed)
  for _, key in ipairs({ P .. 'w:' .. worker, P .. 'suspect' }) do
    if suspect_at(key) == id then
      if crashed then redis.call('PEXPIRE', key, LEASE) else redis.call('DEL', key) end
      suspects[key] = nil
    end
  end
end

-- What ran the job has died. The job is to blame, but not when a suspect ran beside it; that excuse wears out.
local function blame(id, suspect)
  if suspect and suspect ~= id and redis.call('HINCRBY', job_key(id), 'excused', 1) <= 2 * MAX_CRASHES then
    return tonumber(redis.call('HGET', job_key(id), 'crashes'))
  end
  return redis.call('HINCRBY', job_key(id), 'crashes', 1)
end

-- A job is not to blame for a death that was none, where something shows that its worker lives. That excuse wears out, too: a
-- job that stops its workers for so long does so again and again.
local function is_absolved(id) return redis.call('HINCRBY', job_key(id), 'absolved', 1) <= 2 * MAX_CRASHES end

-- The deaths that count against a job and were found by a lease that expired stand in its field `blamed`, with run and worker.
local function death_of(worker, epoch) return '[' .. epoch .. ' ' .. worker .. ']' end

local function remember_death(id, worker, epoch)
  redis.call('HSET', job_key(id), 'blamed', (redis.call('HGET', job_key(id), 'blamed') or '') .. death_of(worker, epoch))
end

-- A worker that was taken for dead speaks of a run that it has lost: it was frozen or cut off. A job that is dead of such
-- deaths stays so, as that may have been told already: its reason says what to do.
local CAME_BACK = '; a worker that was taken for dead has come back since, so the job may not be at fault: retry it'

local function absolve(id, worker, epoch)
  local blamed, death = redis.call('HGET', job_key(id), 'blamed') or '', death_of(worker, epoch)
  local first, last = string.find(blamed, death, 1, true)
  if not first then return end
  redis.call('HSET', job_key(id), 'blamed', string.sub(blamed, 1, first - 1) .. string.sub(blamed, last + 1))
  if not is_absolved(id) then return end
  local h = redis.call('HMGET', job_key(id), 'crashes', 'state', 'error')
  local crashes = tonumber(h[1])
  if crashes > 0 then redis.call('HINCRBY', job_key(id), 'crashes', -1) end
  if h[2] == 'dead' and crashes == MAX_CRASHES then redis.call('HSET', job_key(id), 'error', h[3] .. CAME_BACK) end
end

-- What is counted against a job begins anew, so a worker that comes back takes nothing off that is counted since. Fields
-- that change, too, may follow.
local function count_anew(id, ...)
  redis.call('HSET', job_key(id), 'attempts', 0, 'crashes', 0, 'excused', 0, 'blamed', '', 'absolved', 0, ...)
end

-- Who was heard of within half a lease has not died of a job that it has not renewed for a whole one: it gave it up, as a
-- server that led before told it so, or never heard of it.
local function is_alive(worker) return redis.call('EXISTS', P .. 'a:' .. worker) == 1 end

local function show_alive(worker)
  local key = P .. 'a:' .. worker
  local seen = tonumber(redis.call('GET', key) or 0)
  if math.abs(now - seen) >= LEASE / 10 then redis.call('SET', key, now, 'PX', math.ceil(LEASE / 2)) end
end

-- Called by what workers call often. When nobody was heard of for half a lease the store was away, not the workers:
-- they get half a lease to renew before anything counts as expired. Answers whether leases may expire now.
local function hear()
  local clock = redis.call('HMGET', P .. 'clock', 'heard', 'amnesty')
  local silence = math.abs(now - tonumber(clock[1] or 0))
  if silence >= LEASE / 20 then redis.call('HSET', P .. 'clock', 'heard', now) end
  if silence < LEASE / 2 then return now >= tonumber(clock[2] or 0) end
  redis.call('HSET', P .. 'clock', 'amnesty', now + math.ceil(LEASE / 2))
  return false
end

-- A job as callers see it, or false when it has no record.
local function job_row(id)
  local h = redis.call('HMGET', job_key(id), 'state', 'custom', 'payload', 'result', 'result_sha256', 'error', 'code',
    'worker', 'epoch', 'attempts', 'crashes', 'progress', 'created', 'started', 'ended')
  for i = 1, 15 do h[i] = h[i] or '' end
  h[16] = redis.call('HGET', meta_key(id), 'total')
  h[17] = h[16] and redis.call('ZCARD', done_key(id)) or 0
  h[16] = h[16] or 0
  return { id, unpack(h) }
end

-- Eight hexadecimal digits as four bytes.
local function bytes_of(digits, first) return struct.pack('>I4', tonumber(string.sub(digits, first, first + 7), 16)) end

local function name_of(id, digest) return bytes_of(id, 5) .. bytes_of(id, 13), bytes_of(digest, 1) end

-- Where an entry that begins with `name` is among `entries`, which have `size` bytes each; nil: there is none.
local function entry_at(entries, name, size)
  local at = string.find(entries, name, 1, true)
  while at and (at - 1) % size ~= 0 do at = string.find(entries, name, at + 1, true) end
  return at
end

-- 'known' or 'conflict' for a job that was handed in and may have no record here; nil for any other. And its neighbours.
local function named(batch, id, digest)
  local names = redis.call('HGET', names_key(batch), string.sub(id, 1, 4))
  if not names then return nil, '' end
  local name, content = name_of(id, digest)
  local at = entry_at(names, name, 12)
  return at and (string.sub(names, at + 8, at + 11) == content and 'known' or 'conflict'), names
end

-- Field and beginning of the entry of a result by its content key.
local function content_name(content)
  return string.sub(content, 1, 4), bytes_of(content, 5) .. struct.pack('>I2', tonumber(string.sub(content, 13, 16), 16))
end

local function remember(batch, id, digest, neighbours)
  local name, content = name_of(id, digest)
  redis.call('HSET', names_key(batch), string.sub(id, 1, 4), neighbours .. name .. content)
end

-- A store that is full lets a script write that frees something first, whatever that is: without this, what empties it
-- could not begin.
local function make_way() redis.call('DEL', P .. 'nothing') end

-- Whether `me` is the one that compacts or feeds now, for all gateways. Two at once would do no harm but work in vain.
local function elected(office, me)
  local holder, since = string.match(redis.call('GET', P .. office) or '', '^(%S+) (%d+)$')
  local age = holder and math.abs(now - since) or LEASE -- said by a clock that was ahead it would stay for as long
  if holder ~= me and age < LEASE then return false end
  local is_fresh = holder == me and age < LEASE / 2 -- each write waits for the disk
  if not is_fresh then redis.call('SET', P .. office, me .. ' ' .. string.format('%d', now), 'PX', LEASE) end
  return true
end
