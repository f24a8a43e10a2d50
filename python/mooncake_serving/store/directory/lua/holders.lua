find(read(named('o', keys_in(ARGV[1]))))
return answer()
