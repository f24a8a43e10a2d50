local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat, joined = seat_of(name)
if not seat or joined ~= server() or select(3, parts(seat)) ~= pool then return 0 end
sit(name, seat, entry, ttl)
return 1
