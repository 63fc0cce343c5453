-- Gives a job back; answers 0: not held, 1: done, 2: it is dead now. Arguments: job, worker, epoch, reason, delay in ms, '1' if it counts as a failure, '1' if its
-- payload cannot be used: then it is dead at once.
local id, worker = arg(1), arg(2)
local same, state, batch, entry = holder(id, worker, arg(3))
if not same or state ~= 'running' then
  absolve(id, worker, arg(3))
  return same and 1 or 0
end
forget_suspect(id, worker, false)
local attempts = tonumber(redis.call('HGET', job_key(id), 'attempts'))
if arg(6) == '1' then attempts = redis.call('HINCRBY', job_key(id), 'attempts', 1) end
if arg(7) == '1' then
  bury(id, batch, 'running', arg(4), 'DATA_LOSS')
elseif arg(6) == '1' and attempts >= MAX_ATTEMPTS then
  bury(id, batch, 'running', arg(4), 'ABORTED')
else
  local delay = tonumber(arg(5))
  give_back(id, batch, delay, arg(4), arg(6) == '1' or delay > 0) -- else its worker ends, and any other may take it now
end
drop(entry)
return redis.call('HGET', job_key(id), 'state') == 'dead' and 2 or 1
