-- Keeps a part. Arguments: job, worker, epoch, number, the part behind its digest, most bytes of the job's parts, then
-- tallies in pairs. The failures and deaths that are counted against a job are those since its last part: what gets
-- on is no poison. A suspect runs on as one, until this run ends. With the last part of a job its notes have served.
local id, number, part = arg(1), arg(4), arg(5)
local same, state, batch = holder(id, arg(2), arg(3))
if not same or state ~= 'running' then return 'lost' end
local meta = redis.call('HMGET', meta_key(id), 'total', 'bytes', 'note_bytes')
local total = tonumber(meta[1] or 0)
if tonumber(number) >= total then return 'outside' end
if redis.call('ZRANGEBYSCORE', done_key(id), number, number)[1] then return 'known' end
local is_last = redis.call('ZCARD', done_key(id)) + 1 == total
local more = #part - (is_last and tonumber(meta[3] or 0) or 0)
if tonumber(meta[2]) + more > tonumber(arg(6)) then return 'full' end
if is_last then
  for name in string.gmatch(redis.call('HGET', meta_key(id), 'notes') or '', '%S+') do
    redis.call('HDEL', parts_key(id), note_field(name))
  end
  redis.call('HDEL', meta_key(id), 'notes', 'note_bytes')
end
redis.call('HSET', parts_key(id), number, part)
redis.call('ZADD', done_key(id), number, number)
grow_parts(id, batch, more)
add(batch_key(batch), 'p:done', 1)
for i = 7, num_args(), 2 do redis.call('HINCRBYFLOAT', meta_key(id), 't:' .. arg(i), arg(i + 1)) end
count_anew(id)
return 'kept'
