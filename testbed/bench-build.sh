#!/usr/bin/env bash
# Builds berth from nothing and prints where the time went: wall and CPU seconds per crate, sizes, rebuilds after one change.
#   bench-build.sh [PROFILE...]   profiles to build (default: demo); `release` builds as `make build` does, but for this machine's own libc
#
# Every compilation is measured by a wrapper around rustc. The registry must be filled before (cargo fetch); nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dir=$PWD/target/bench-build
log=$dir/units

mkdir -p "$dir"
cat >"$dir/rustc" <<'WRAPPER'
#!/usr/bin/env bash
# Runs rustc, and notes what a crate cost: name, wall, user and system seconds.
TIMEFORMAT='%R %U %S'
name=
previous=
for argument in "$@"; do
    [ "$previous" != --crate-name ] || name=$argument
    previous=$argument
done
case $name in "" | ___) exec "$@" ;; esac
exec 3>&2
{ times=$({ time "$@" 2>&3 1>&4; } 2>&1); } 4>&1
status=$?
echo "$name $times" >>"$BENCH_BUILD_LOG"
exit $status
WRAPPER
chmod +x "$dir/rustc"
export BENCH_BUILD_LOG=$log RUSTC_WRAPPER=$dir/rustc CARGO_INCREMENTAL

for profile in "${@:-demo}"; do
    target=$dir/$profile
    rm -rf "$target" "$log"
    unset CARGO_INCREMENTAL
    TIMEFORMAT='%R %U %S'
    times=$({ time cargo build --offline --locked --quiet --profile "$profile" -p berth --target-dir "$target" 1>&2 2>"$dir/errors"; } 2>&1) || {
        cat "$dir/errors" >&2
        exit 1
    }
    read -r wall user system <<<"$times"
    out=$target/$profile
    [ "$profile" != dev ] || out=$target/debug
    echo "profile $profile: $(LC_ALL=C printf '%.0f' "$wall") s wall, $(awk "BEGIN { printf \"%.0f\", $user + $system }") s CPU on $(nproc) cores;" \
        "binary $(awk "BEGIN { printf \"%.1f\", $(stat -c %s "$out/berth") / 1e6 }") MB"
    printf '\n  %-24s %8s %8s\n' crate wall CPU
    awk '
        { ours = $1 ~ /^berth/; name = ours ? $1 : ($1 == "build_script_build" ? "build scripts" : "dependencies")
          wall[name] += $2; cpu[name] += $3 + $4 }
        END { for (name in wall) printf "  %-24s %7.1fs %7.1fs\n", name, wall[name], cpu[name] }' "$log" | sort -k3 -rn -t's'
    printf '\n  the ten dearest dependencies\n'
    awk '$1 !~ /^berth|^build_script/ { wall[$1] += $2; cpu[$1] += $3 + $4 }
        END { for (name in wall) printf "  %-24s %7.1fs %7.1fs\n", name, wall[name], cpu[name] }' "$log" | sort -k3 -rn -t's' | head -n 10
    echo
done

# What a person waits for who changed one line: the crate, all that depend on it, and the link.
unset RUSTC_WRAPPER
echo "rebuild of berth after a change in one crate (profile dev, incremental)"
cargo build --offline --locked --quiet -p berth
for manifest in crates/*/Cargo.toml; do
    crate=$(dirname "$manifest")
    source=$crate/src/lib.rs
    [ -e "$source" ] || source=$crate/src/main.rs
    touch "$source"
    TIMEFORMAT=%R
    wall=$({ time cargo build --offline --locked --quiet -p berth 1>&2 2>"$dir/errors"; } 2>&1)
    printf '  %-24s %7.1fs\n' "$(basename "$crate")" "$wall"
done

if cargo llvm-lines --version >/dev/null 2>&1; then
    printf '\nlines of LLVM that each crate gives to the code generator\n'
    for manifest in crates/*/Cargo.toml; do
        crate=$(basename "$(dirname "$manifest")")
        kind=--lib
        [ "$crate" != berth ] || kind="--bin berth"
        # shellcheck disable=SC2086 # two words
        lines=$(cargo llvm-lines --offline --locked -p "$crate" $kind 2>/dev/null | awk '/\(TOTAL\)/ { print $1 }')
        printf '  %-24s %10s\n' "$crate" "${lines:-?}"
    done
else
    printf '\n(cargo install cargo-llvm-lines, and the lines of LLVM per crate are printed too)\n'
fi
