-- Commits runs, each with the tallies of its parts if it has any. Arguments, for each: job, worker, epoch, state, result, its
-- digest, error, code, content key, how many tallies, and these in pairs.
-- Answers for each 0: not held, 1: done, 2: nothing done, as parts are missing.
local out, at = {}, 1

local function finish(id, worker, epoch, state, result, digest, why, code, content)
  local same, before, batch, entry, progress, old_error = holder(id, worker, epoch)
  if not same or before ~= 'running' then
    absolve(id, worker, epoch)
    return same and before == state and 1 or 0
  end
  local meta = state == 'done' and redis.call('HGETALL', meta_key(id)) or {}
  if #meta > 0 and redis.call('ZCARD', done_key(id)) < tonumber(redis.call('HGET', meta_key(id), 'total') or 0) then
    return 2
  end
  local fields = {}
  if state == 'done' then fields = { 'result', result, 'result_sha256', digest } end
  if why ~= '' or old_error then put(fields, 'error', why) end
  if code ~= '' or old_error then put(fields, 'code', code) end
  if state == 'done' and content ~= '' then put(fields, 'content', content) end
  move(id, batch, 'running', state, unpack(fields))
  drop(entry)
  if state == 'done' and content ~= '' then redis.call('SET', P .. 'r:' .. content, id) end
  if state == 'done' then redis.call('HDEL', batch_key(batch), 'obstacle', 'obstacle_at') end -- it runs again
  if progress then redis.call('HDEL', job_key(id), 'progress') end
  for i = 1, #meta, 2 do
    if string.sub(meta[i], 1, 2) == 't:' then add(batch_key(batch), meta[i], meta[i + 1]) end
  end
  for i = at + 10, at + 8 + 2 * arg(at + 9), 2 do add(batch_key(batch), 't:' .. arg(i), arg(i + 1)) end
  forget_suspect(id, worker, false)
  return 1
end

while at <= num_args() do
  out[#out + 1] = finish(unpack(ARGV, FIRST_ARG + at, FIRST_ARG + at + 8))
  at = at + 10 + 2 * arg(at + 9)
end
return out
