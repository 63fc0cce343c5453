-- The result files of a batch from a number on. Arguments: batch, number. Answers: since when the batch is; the files.
local key = P .. 'b:' .. arg(1)
if redis.call('EXISTS', key) == 0 then return 'unknown' end
return { redis.call('HGET', key, 'created'), unpack(redis.call('LRANGE', key .. ':files', arg(2), tonumber(arg(2)) + 999)) }
