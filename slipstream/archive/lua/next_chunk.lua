-- What is to be fed next, if there is room: batches that have jobs outside take turns, a chunk each. One whose failed jobs
-- take as much as all others may, with their parts, waits for somebody to look.
-- Argument: who asks. Answers: nothing, or batch, number of the chunk, how many of its jobs were fed, the chunk, and for
-- how many bytes there is room.
local FAILED_BYTES = 1024
if not elected('feeder', arg(1)) then return {} end
local room = math.floor(BUDGET / 2 - held_bytes())
if room <= 0 then return {} end
for _, batch in ipairs(redis.call('ZRANGE', P .. 'chunks', 0, 99)) do
  local h = redis.call('HMGET', batch_key(batch), 'n:failed', 'n:dead', 'p:idle', 'chunk', 'fed')
  local failed = (tonumber(h[1] or 0) + tonumber(h[2] or 0)) * FAILED_BYTES + tonumber(h[3] or 0)
  if is_cancelled(batch) or failed < BUDGET then
    local chunk = redis.call('LRANGE', chunks_key(batch), 0, 0)[1]
    return { batch, h[4] or '0', h[5] or '0', chunk, room }
  end
end
return {}
