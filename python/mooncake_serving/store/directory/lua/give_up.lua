local pool, keys, ttl = number_of(ARGV[1]), keys_in(ARGV[2]), ARGV[3]
local said, has_other, answers, going = read(named('o', keys)), {[false] = false}, {}, {}
for i = 1, #keys do
  local pools = said[i]
  if has_other[pools] == nil then
    local living = living_of(pools)
    has_other[pools] = #living > 0 and (#living > 1 or living[1] ~= pool)
  end
  answers[i] = has_other[pools] and '\1' or '\0'
  if has_other[pools] and pool and with(pool, pools) == pools then going[#going + 1] = keys[i] end
end
if #going > 0 then
  local objects, marks = named('o', going), named('l', going)
  call_with_all(going, 'SREM', prefix .. 'p' .. pool)
  change(objects, read(objects), function(pools) return without(pool, pools) end)
  for i, leaving in ipairs(read(marks)) do
    redis.call('SET', marks[i], with(pool, leaving or ''), 'PX', ttl)
  end
end
return table.concat(answers)
