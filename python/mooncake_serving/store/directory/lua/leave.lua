local seat = seat_of(ARGV[1])
if seat then stand_up(seat) end
redis.call('HDEL', prefix .. 'members', ARGV[1])
return 1
