#compdef pipeline
_pipeline() {
    local -a found ends
    found=("${(@f)$(${(Q)words[1]} __complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found" ]]; then _files; return; fi
    [[ $#found -eq 1 && ${found[1]%%$'\t'*} == *= ]] && ends=(-S '')
    found=("${(@)found//:/\\:}")
    found=("${(@)found/$'\t'/:}")
    _describe pipeline found "${ends[@]}"
}
compdef _pipeline pipeline
