-- The rest of publish_new_fast.lua: some objects are known.
local held, writes = {[false] = false}, {[false] = false}
local answers, listed, changed, before, ended = {}, {}, {}, {}, {}
for i = 1, count do
  local pools, claimant, removed = said[i], said[count + i], said[2 * count + i]
  if held[pools] == nil then
    local living = living_of(pools)
    held[pools] = #living > 1 or #living == 1 and living[1] ~= pool
  end
  if writes[claimant] == nil then writes[claimant] = lives('alive', claimant) end
  if held[pools] or writes[claimant] then
    answers[i] = '\1'
  else
    answers[i] = '\0'
    listed[#listed + 1], changed[#changed + 1], before[#before + 1] = keys[i], names[i], pools
    if claimant then ended[#ended + 1] = names[count + i] end
    if removed then ended[#ended + 1] = names[2 * count + i] end
  end
end
change(changed, before, function(pools) return with(pool, pools) end)
call_with_all(listed, 'SADD', prefix .. 'p' .. pool)
call_with_all(ended, 'DEL')
return table.concat(answers)
