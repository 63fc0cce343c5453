-- Finds the parts of a job, for its holder. Arguments: job, worker, epoch, key, total, layout.
-- Parts of another key are dropped: they are of other options, another file or another model. A total that is not 0 says
-- how many there will be, once. Answers nothing when the lease is lost; else the total, the layout, and the numbers of
-- those that are there.
local id, key, total = arg(1), arg(4), tonumber(arg(5))
local same, state, batch = holder(id, arg(2), arg(3))
if not same or state ~= 'running' then return false end
local meta = redis.call('HMGET', meta_key(id), 'key', 'total')
if meta[1] ~= key then
  drop_parts(id, batch)
  redis.call('HSET', meta_key(id), 'key', key, 'total', 0, 'bytes', 0)
  meta[2] = '0'
end
if total > 0 and meta[2] == '0' then
  redis.call('HSET', meta_key(id), 'total', total, 'layout', arg(6))
  add(batch_key(batch), 'p:total', total)
end
meta = redis.call('HMGET', meta_key(id), 'total', 'layout')
return { meta[1], meta[2] or '', redis.call('ZRANGE', done_key(id), 0, -1) }
