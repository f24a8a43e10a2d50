local seat, ttl, keys = seat_of(ARGV[1]), ARGV[2], keys_in(ARGV[3])
if not seat then return false end
local said, claims = read(named('o', keys)), named('c', keys)
local claimants = read(claims)
local _, own = parts(seat)
local held, writes, answers = {[false] = false}, {[false] = false, [seat] = false}, {}
for i = 1, #keys do
  local pools, claimant = said[i], claimants[i]
  if held[pools] == nil then
    local living = living_of(pools)
    held[pools] = #living > 0 and ((#living > 1 or living[1] ~= own) and '\1' or '\3')
  end
  if writes[claimant] == nil then writes[claimant] = lives('alive', claimant) end
  if held[pools] then
    answers[i] = held[pools]
  elseif writes[claimant] then
    answers[i] = '\2'
  else
    redis.call('SET', claims[i], seat, 'PX', ttl)
    answers[i] = '\0'
  end
end
return table.concat(answers)
