-- Answers: queued, delayed, suspects that wait, running, dead.
local n = redis.call('HMGET', P .. 'totals', 'queued', 'running', 'dead')
local stream, suspects = stream_key('suspects'), 0
if redis.call('EXISTS', stream) == 1 then
  suspects = redis.call('XLEN', stream) - redis.call('XPENDING', stream, GROUP)[1]
end
return { tonumber(n[1] or 0), redis.call('ZCARD', P .. 'delayed'), suspects, tonumber(n[2] or 0), tonumber(n[3] or 0) }
