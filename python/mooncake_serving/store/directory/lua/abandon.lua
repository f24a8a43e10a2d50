local seat, claims = seat_of(ARGV[1]), named('c', keys_in(ARGV[2]))
if not seat then return 0 end
local ended = {}
for i, claimant in ipairs(read(claims)) do
  if claimant == seat then ended[#ended + 1] = claims[i] end
end
call_with_all(ended, 'DEL')
return 1
