-- Removes what is left of jobs that are in a result file. Arguments: who compacts, batch, how many. Answers how many are left.
local me, batch = arg(1), arg(2)
make_way()
elected('compactor', me)
local left = tonumber(redis.call('HGET', batch_key(batch), 'freeing') or 0)
local n = math.min(left, tonumber(arg(3)))
if n == 0 then return 0 end

local ENTRY, PRUNE_EVERY = 14, 16

-- The number by which entries name this batch; asked for once.
local number

local function number_of_batch()
  number = number or redis.call('HGET', batch_key(batch), 'filed')
  if number then return number end
  number = redis.call('HINCRBY', P .. 'clock', 'filed', 1)
  redis.call('HSET', batch_key(batch), 'filed', number)
  redis.call('HSET', P .. 'filed', number, batch)
  return number
end

-- Entries without those of batches that are gone.
local function pruned(entries)
  local kept = {}
  for at = 1, #entries, ENTRY do
    local owner = struct.unpack('>I4', entries, at + 6)
    if redis.call('HGET', P .. 'filed', owner) then kept[#kept + 1] = string.sub(entries, at, at + ENTRY - 1) end
  end
  return table.concat(kept)
end

-- From now on the result of this content is looked for in the files of this batch. Of two the later one stays, as it is
-- kept for longer.
local function file_content(content, at)
  if not string.match(content, '^%x+$') or #content ~= 64 then return end
  local field, name = content_name(content)
  local entries = redis.call('HGET', P .. 'contents', field) or ''
  local old = entry_at(entries, name, ENTRY)
  if old then entries = string.sub(entries, 1, old - 1) .. string.sub(entries, old + ENTRY) end
  if #entries % (PRUNE_EVERY * ENTRY) == 0 then entries = pruned(entries) end
  redis.call('HSET', P .. 'contents', field, entries .. name .. struct.pack('>I4I4', number_of_batch(), at))
end

local function free(at, id)
  local h = redis.call('HMGET', job_key(id), 'state', 'content', 'payload_sha256')
  if not h[1] then return end
  local known, neighbours = named(batch, id, h[3])
  if not known then remember(batch, id, h[3], neighbours) end
  local bytes, parts = job_bytes(id, h[1]), redis.call('HGET', meta_key(id), 'bytes')
  if parts then redis.call('HSET', P .. 'b:' .. batch .. ':where', id, at) end
  local gone = { job_key(id) }
  if h[2] and h[2] ~= '' and redis.call('GET', P .. 'r:' .. h[2]) == id then
    file_content(h[2], at)
    gone[#gone + 1] = P .. 'r:' .. h[2]
  end
  if parts then
    for _, key in ipairs({ parts_key(id), done_key(id), meta_key(id) }) do gone[#gone + 1] = key end
  end
  redis.call('DEL', unpack(gone))
  add(P .. 'totals', h[1], -1)
  add(P .. 'totals', 'bytes', -bytes)
  add(batch_key(batch), 'ended_bytes', -bytes - (parts or 0))
  add(batch_key(batch), 'p:bytes', -(parts or 0))
  add(P .. 'totals', 'part_bytes', -(parts or 0))
end

for _, entry in ipairs(redis.call('LRANGE', ended_key(batch), 0, n - 1)) do free(string.match(entry, '^(%d+) (%S+)$')) end
redis.call('LTRIM', ended_key(batch), n, -1)
if left > n then return redis.call('HINCRBY', batch_key(batch), 'freeing', -n) end
redis.call('HDEL', batch_key(batch), 'freeing')
if redis.call('EXISTS', ended_key(batch)) == 0 then
  redis.call('ZREM', P .. 'ended', batch)
else
  redis.call('ZADD', P .. 'ended', 'XX', now, batch)
end
return 0
