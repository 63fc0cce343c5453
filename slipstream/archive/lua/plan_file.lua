-- What is to be written next. Which jobs a result file has, and in which order, is fixed here before it is written, so
-- whoever writes it writes the same. Arguments: who asks, bytes of a file, ms after which less will do.
-- Answers: nothing; or batch, number of the file, and its jobs as '<position> <id>'; without jobs: they are written, and
-- what is left of them is to be freed.
local MAX_JOBS, MAX_BATCHES = 20000, 200
local me, file_bytes, age = arg(1), tonumber(arg(2)), tonumber(arg(3))
make_way()
if not elected('compactor', me) then return {} end
local enough = held_bytes() >= BUDGET / 2 and math.min(file_bytes, BUDGET / 8) or file_bytes

local function plan(batch, since)
  local h = redis.call('HMGET', batch_key(batch), 'plan', 'freeing', 'ended_bytes', 'blocked')
  if tonumber(h[4] or 0) > now then return end
  if h[2] then return { batch, 0, {} } end
  local number, n = string.match(h[1] or '', '^(%d+) (%d+)$')
  if not n then
    local bytes, length = tonumber(h[3]), redis.call('LLEN', ended_key(batch))
    if bytes < enough and now - since < age then return end
    number = redis.call('LLEN', P .. 'b:' .. batch .. ':files')
    n = math.max(1, math.min(length, MAX_JOBS, math.floor(length * file_bytes / bytes)))
    redis.call('HSET', batch_key(batch), 'plan', number .. ' ' .. n)
  end
  return { batch, tonumber(number), redis.call('LRANGE', ended_key(batch), 0, n - 1) }
end

local batches = redis.call('ZRANGE', P .. 'ended', 0, MAX_BATCHES - 1, 'WITHSCORES')
for i = 1, #batches, 2 do
  local found = plan(batches[i], tonumber(batches[i + 1]))
  if found then return found end
end
return {}
