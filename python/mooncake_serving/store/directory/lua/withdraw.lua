local pool, keys = number_of(ARGV[1]), keys_in(ARGV[2])
if not pool then return 0 end
local objects, marks = named('o', keys), named('l', keys)
call_with_all(keys, 'SREM', prefix .. 'p' .. pool)
change(objects, read(objects), function(pools) return without(pool, pools) end)
for i, leaving in ipairs(read(marks)) do
  if leaving then redis.call('SET', marks[i], without(pool, leaving), 'KEEPTTL') end
end
return 1
