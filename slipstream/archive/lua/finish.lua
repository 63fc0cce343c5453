-- Commits runs, each with the tallies of its parts if it has any. Arguments, for each: job, worker, epoch, state, result, its
-- digest, error, code, content key, how many tallies, and these in pairs.
-- Answers for each 0: not held, 1: done, 2: nothing done, as parts are missing.
local out, at = {}, 1

local function finish(id, worker, epoch, state, result, digest, why, code, content)
  local same, before, batch, entry = holder(id, worker, epoch)
  if not same or before == 'queued' then return 0 end
  if before ~= 'running' then return 1 end
  local meta = redis.call('HGETALL', meta_key(id))
  if state == 'done' and #meta > 0 and redis.call('ZCARD', done_key(id)) < tonumber(redis.call('HGET', meta_key(id), 'total') or 0) then
    return 2
  end
  drop(entry)
  redis.call('HSET', job_key(id), 'error', why, 'code', code)
  redis.call('HDEL', job_key(id), 'progress')
  if state == 'done' then
    redis.call('HSET', job_key(id), 'result', result, 'result_sha256', digest, 'content', content)
    if content ~= '' then redis.call('SET', P .. 'r:' .. content, id) end
    for i = 1, #meta, 2 do
      if string.sub(meta[i], 1, 2) == 't:' then redis.call('HINCRBYFLOAT', batch_key(batch), meta[i], meta[i + 1]) end
    end
  end
  for i = at + 10, at + 8 + 2 * arg(at + 9), 2 do redis.call('HINCRBYFLOAT', batch_key(batch), 't:' .. arg(i), arg(i + 1)) end
  forget_suspect(id, worker, false)
  move(id, batch, 'running', state)
  return 1
end

while at <= num_args() do
  out[#out + 1] = finish(unpack(ARGV, FIRST_ARG + at, FIRST_ARG + at + 8))
  at = at + 10 + 2 * arg(at + 9)
end
return out
