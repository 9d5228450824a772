_pipeline() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\n'
    local word=${line##*[[:space:]]}
    local kept=${word%"${word##*[=:]}"}   # readline goes on behind these
    COMPREPLY=( $("$1" __complete "$line" 2>/dev/null | cut -f 1) )
    COMPREPLY=( "${COMPREPLY[@]#"$kept"}" )
    if [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _pipeline pipeline
