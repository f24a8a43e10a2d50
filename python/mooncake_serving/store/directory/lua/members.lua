local entries = {}
for _, record in ipairs(redis.call('HVALS', prefix .. 'members')) do
  local seat, _, entry = unpack(cmsgpack.unpack(record))
  if lives('alive', seat) then entries[#entries + 1] = entry end
end
return entries
