-- Commits, with the tallies of its parts if it has any. Answers 0: not held, 1: done, 2: nothing done, as parts are missing.
-- Arguments: job, worker, epoch, state, result, its digest, error, code, content key, then tallies in pairs.
local id, worker, state = arg(1), arg(2), arg(4)
local same, before, batch, entry = holder(id, worker, arg(3))
if not same or before == 'queued' then return 0 end
if before ~= 'running' then return 1 end
if state == 'done' and redis.call('ZCARD', done_key(id)) < tonumber(redis.call('HGET', meta_key(id), 'total') or 0) then
  return 2
end
drop(entry)
redis.call('HSET', job_key(id), 'error', arg(7), 'code', arg(8))
redis.call('HDEL', job_key(id), 'progress')
if state == 'done' then
  redis.call('HSET', job_key(id), 'result', arg(5), 'result_sha256', arg(6), 'content', arg(9))
  if arg(9) ~= '' then redis.call('SET', P .. 'r:' .. arg(9), id) end
  local meta = redis.call('HGETALL', meta_key(id))
  for i = 1, #meta, 2 do
    if string.sub(meta[i], 1, 2) == 't:' then redis.call('HINCRBYFLOAT', batch_key(batch), meta[i], meta[i + 1]) end
  end
end
for i = 10, num_args(), 2 do redis.call('HINCRBYFLOAT', batch_key(batch), 't:' .. arg(i), arg(i + 1)) end
forget_suspect(id, worker, false)
move(id, batch, 'running', state)
return 1
