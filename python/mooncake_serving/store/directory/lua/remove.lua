-- Mark objects as no longer present in the pools that have them, and remember the removal for a
-- time.
local keys, ttl = keys_in(ARGV[1]), ARGV[2]
local objects, marks = named('o', keys), named('r', keys)
local leaving = named('l', keys)
local said, before, going, had, listed = read(objects), read(marks), read(leaving), {}, {}
local living = {[false] = {}}  -- of what is said
for i = 1, #keys do
  local pools = said[i]
  living[pools] = living[pools] or living_of(pools)
  for _, pool in ipairs(living[pools]) do
    listed[pool] = listed[pool] or {}
    table.insert(listed[pool], keys[i])
  end
  had[i] = pools or ''
  if before[i] or going[i] then
    for _, pool in ipairs(living_of((before[i] or '') .. (going[i] or ''))) do
      had[i] = with(pool, had[i])
    end
  end
end
find(had)
for pool, some in pairs(listed) do call_with_all(some, 'SREM', prefix .. 'p' .. pool) end
change(objects, said, function(pools)
  for _, pool in ipairs(living_of(pools)) do pools = without(pool, pools) end
  return pools
end)
call_with_all(leaving, 'DEL')
call_with_all(marks, 'DEL')  -- gives something up, so that what follows is not refused
for i = 1, #keys do redis.call('SET', marks[i], had[i], 'PX', ttl) end
return answer()
