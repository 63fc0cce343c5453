-- Whether anything of the latest hundred batches lies outside: results in files, or jobs in chunks.
for _, batch in ipairs(redis.call('ZREVRANGE', P .. 'batches', 0, 99)) do
  if redis.call('EXISTS', P .. 'b:' .. batch .. ':files', chunks_key(batch)) > 0 then return 1 end
end
return 0
