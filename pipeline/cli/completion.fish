function __pipeline_complete
    pipeline __complete (commandline -cp) 2>/dev/null
end
complete -c pipeline -f -n 'count (__pipeline_complete) >/dev/null' -a '(__pipeline_complete)'
