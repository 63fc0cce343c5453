-- Removes what is left of jobs that are in a result file. Arguments: who compacts, batch, how many. Answers how many are left.
local me, batch = arg(1), arg(2)
elected('compactor', me)
local left = tonumber(redis.call('HGET', batch_key(batch), 'freeing') or 0)
local n = math.min(left, tonumber(arg(3)))
if n == 0 then return 0 end

local gone, by_state, freed, parts = {}, {}, 0, 0

-- What is removed is removed last, so that a key that is damaged leaves the sums right.
local function free(at, id)
  local h = redis.call('HMGET', job_key(id), 'state', 'content', 'payload_sha256')
  if not h[1] then return end
  if not named(batch, id, h[3]) then remember(batch, id, h[3]) end
  by_state[h[1]] = (by_state[h[1]] or 0) + 1
  freed = freed + job_bytes(id)
  gone[#gone + 1] = job_key(id)
  if h[2] and redis.call('GET', P .. 'r:' .. h[2]) == id then gone[#gone + 1] = P .. 'r:' .. h[2] end
  local bytes = redis.call('HGET', meta_key(id), 'bytes')
  if bytes then
    redis.call('HSET', P .. 'b:' .. batch .. ':where', id, at)
    parts = parts + bytes
    for _, key in ipairs({ parts_key(id), done_key(id), meta_key(id) }) do gone[#gone + 1] = key end
  end
end

for _, entry in ipairs(redis.call('LRANGE', ended_key(batch), 0, n - 1)) do free(string.match(entry, '^(%d+) (%S+)$')) end
for state, num in pairs(by_state) do redis.call('HINCRBY', P .. 'totals', state, -num) end
redis.call('HINCRBY', P .. 'totals', 'bytes', -freed)
redis.call('HINCRBY', batch_key(batch), 'ended_bytes', -freed - parts)
if parts > 0 then
  redis.call('HINCRBY', batch_key(batch), 'p:bytes', -parts)
  redis.call('HINCRBY', P .. 'totals', 'part_bytes', -parts)
end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
redis.call('LTRIM', ended_key(batch), n, -1)
if left > n then return redis.call('HINCRBY', batch_key(batch), 'freeing', -n) end
redis.call('HDEL', batch_key(batch), 'freeing')
if redis.call('EXISTS', ended_key(batch)) == 0 then
  redis.call('ZREM', P .. 'ended', batch)
else
  redis.call('ZADD', P .. 'ended', 'XX', now, batch)
end
return 0
