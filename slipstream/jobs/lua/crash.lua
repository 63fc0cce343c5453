-- What ran the job died, the worker did not. Arguments: job, worker, epoch, reason.
local id, worker = arg(1), arg(2)
local same, state, batch, entry = holder(id, worker, arg(3))
if not same then return 0 end
if state ~= 'running' then return 1 end
drop(entry)
local crashes = blame(id, suspect_of(worker) or redis.call('GET', P .. 'suspect'))
forget_suspect(id, worker, true)
if crashes >= MAX_CRASHES then
  bury(id, batch, 'running', 'whatever ran it died ' .. crashes .. ' times: ' .. arg(4), 'ABORTED')
else
  redis.call('HSET', job_key(id), 'error', arg(4))
  give_back(id, batch, 0)
end
return 1
