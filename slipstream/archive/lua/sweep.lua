-- Deletes a part of a batch that is past its retention. Argument: number of jobs to delete at most.
-- Answers: how many jobs were deleted; '1' if there is more to do; and of a batch that cannot be deleted, as something of
-- it is damaged, its id and why. It is left for another retention, so that it keeps no other one here.
local function sweep(batch)
  if redis.call('LLEN', ended_key(batch)) > 0 then -- its results are yet to be written: it is kept a while longer
    keep_until_expiry(batch)
    return { 0, 1 }
  end
  local n = 0
  for _, id in ipairs(redis.call('LRANGE', jobs_key(batch), 0, tonumber(arg(1)) - 1)) do
    local h = redis.call('HMGET', job_key(id), 'state', 'content', 'at')
    if h[1] then count(batch, h[1], -1) end
    if h[1] and h[3] then add(P .. 'totals', 'bytes', -weight(h[1], job_bytes(id, h[1]))) end
    redis.call('ZREM', P .. 'dead', id)
    if h[2] and redis.call('GET', P .. 'r:' .. h[2]) == id then redis.call('DEL', P .. 'r:' .. h[2]) end
    set_idle(id, batch, 0)
    drop_parts(id, batch)
    redis.call('DEL', job_key(id))
    n = n + 1
  end
  redis.call('LTRIM', jobs_key(batch), n, -1)
  add(batch_key(batch), 'swept', n)
  settle() -- while there is a batch that has sums
  if redis.call('EXISTS', jobs_key(batch)) == 0 then
    redis.call('ZREM', P .. 'batches', batch)
    redis.call('ZREM', P .. 'o:' .. owner_of(batch), batch)
    for _, name in ipairs({ 'files', 'outside', 'names', 'where' }) do redis.call('DEL', P .. 'b:' .. batch .. ':' .. name) end
    local number = redis.call('HGET', batch_key(batch), 'filed')
    if number then redis.call('HDEL', P .. 'filed', number) end
    if redis.call('EXISTS', P .. 'filed') == 0 then redis.call('DEL', P .. 'contents') end
    redis.call('DEL', batch_key(batch))
    redis.call('ZREM', P .. 'expiry', batch)
  end
  return { n, 1 }
end

local batch = redis.call('ZRANGEBYSCORE', P .. 'expiry', '-inf', now, 'LIMIT', 0, 1)[1]
if not batch then return { 0, 0 } end
local ok, answer = pcall(sweep, batch)
if ok then return answer end
redis.pcall('ZADD', P .. 'expiry', now + RETENTION, batch)
return { 0, 1, batch, type(answer) == 'table' and answer.err or answer }
