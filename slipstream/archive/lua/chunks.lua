-- Chunks of a batch that wait outside. Arguments: batch. Answers: how many jobs the batch has here or in files, how many
-- of the first chunk were fed, and the chunks.
local batch = arg(1)
return { redis.call('LLEN', jobs_key(batch)), tonumber(redis.call('HGET', batch_key(batch), 'fed') or 0),
  redis.call('LRANGE', chunks_key(batch), 0, -1) }
