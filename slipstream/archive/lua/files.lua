-- The result files of a batch from a number on. Arguments: batch, number, job or ''. Answers: since when the batch is, the
-- position of the job if it has parts and is in one of them, then the files.
local key = P .. 'b:' .. arg(1)
if redis.call('EXISTS', key) == 0 then return 'unknown' end
return { redis.call('HGET', key, 'created'), redis.call('HGET', key .. ':where', arg(3)) or '',
  unpack(redis.call('LRANGE', key .. ':files', arg(2), tonumber(arg(2)) + 999)) }
