-- What ran the job died, the worker did not. Answers 0: not held, 1: done, 2: the job is dead now.
-- Arguments: job, worker, epoch, reason.
local id, worker = arg(1), arg(2)
local same, state, batch, entry = holder(id, worker, arg(3))
if not same then return 0 end
if state ~= 'running' then return 1 end
local crashes = blame(id, suspect_of(worker) or redis.call('GET', P .. 'suspect'))
forget_suspect(id, worker, true)
if crashes >= MAX_CRASHES then
  bury(id, batch, 'running', 'whatever ran it died ' .. crashes .. ' times: ' .. arg(4), 'ABORTED')
else
  give_back(id, batch, 0, arg(4), true)
end
drop(entry)
return redis.call('HGET', job_key(id), 'state') == 'dead' and 2 or 1
