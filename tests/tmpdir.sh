#!/bin/sh
# Print where tests write: into memory, if that has room and runs programs, else where other programs do.
place=/dev/shm
probe=$place/.ckpttool-probe-$$
room=$(df -Pk "$place" 2>/dev/null | awk 'NR == 2 { print $4 }')
if [ "${room:-0}" -gt 4000000 ] && printf '#!/bin/sh\n' > "$probe" && chmod +x "$probe" && "$probe"; then
    echo "$place"
else
    echo "${TMPDIR:-/tmp}"
fi 2>/dev/null
rm -f "$probe"
