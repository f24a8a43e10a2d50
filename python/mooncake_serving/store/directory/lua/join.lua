local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat = seat_of(name)
if seat and select(3, parts(seat)) ~= pool then
  stand_up(seat)
  seat = nil
end
if not seat then
  local number = '0'
  if pool ~= '' then
    number = number_of(pool)
    if not number then
      number = tostring(redis.call('INCR', prefix .. 'numbers'))
      redis.call('HSET', prefix .. 'pools', number, pool)
      redis.call('HSET', prefix .. 'names', pool, number)
    end
  end
  seat = redis.call('INCR', prefix .. 'numbers') .. ' ' .. number .. ' ' .. pool
end
sit(name, seat, entry, ttl)
return 1
