-- A note of a job behind its digest, or nothing. Arguments: job, name.
return redis.call('HGET', parts_key(arg(1)), note_field(arg(2)))
