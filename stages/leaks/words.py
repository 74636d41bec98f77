"""Words that carry no information about a task's data: commands, options, file endings, function words, numerals.

Nouns that could be an answer (names, colours, places) are deliberately absent.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READERS = words("""
    cat head tail less more grep egrep fgrep rg zgrep awk gawk sed cut sort uniq wc ls find tree stat file diff cmp
    strings od xxd hexdump jq nl tac rev paste join comm column tr fold du df ps env printenv id whoami pwd sha256sum
    sha1sum md5sum cksum base64 zcat unzip tar git sqlite3 psql mysql curl wget python python3 perl ruby node openssl
    objdump readelf nm ldd journalctl dmesg dig nslookup ss netstat lsof test seq date basename dirname readlink
    realpath which type
""")
LISTERS = words("""
    ls find tree dir fd git du stat file tar unzip which
""")
WRITERS = words("""
    echo printf touch mkdir mv cp rm rmdir ln chmod chown chgrp tee truncate dd install rsync patch kill cd export set
    unset alias source sleep true false exit pushd popd umask wait trap nohup timeout time xargs sudo env
""")
TOOLS = words("""
    apt apt-get dpkg yum dnf apk pip pip3 uv conda npm npx yarn cargo rustc go gcc g++ cc clang make cmake ninja meson
    configure java javac mvn gradle bash sh zsh dash docker kubectl systemctl service nginx apache2 ssh scp ssh-keygen
    sshpass gpg 7z 7za gzip gunzip bzip2 xz zip ffmpeg convert magick qemu-system-x86_64 qemu-img tmux screen crontab
    useradd usermod passwd su hostname ip ping nc pytest R Rscript julia ghc ocaml lua php redis-cli mongo pg_dump
    createdb john hashcat vim nano emacs man top htop gdb strace valgrind rpm flask uvicorn gunicorn jupyter latexmk
    pdflatex pandoc m4 bc expr yes shuf split csplit expand fmt pr nproc free uname lsblk mount umount iptables ufw
    openssl hg svn bzr
""")
COMMANDS = READERS | WRITERS | TOOLS

INTERACTIVE = words("""
    vi vim nvim nano emacs pico less more man top htop screen tmux gdb passwd visudo mc watch crontab-e joe ed info
""")

FUNCTION_WORDS = words("""
    a an the this that these those it its is are was were be been being am do does did done doing has have had having
    will would can could shall should may might must of in on at by for from to into onto with without within over
    under as if then else when while until unless because so than and or not no nor but only also just even still
    again each every all any some both few more most other another such same own which who whom whose what where why
    how there here you your we our i they them their he she him her us me my mine one's up down out off above below
    between through during before after against about across along per via
""")

# Plain words of instructions to a terminal. They explain nothing and betray nothing.
TASK_WORDS = words("""
    read write create make use run execute open close save store put place move copy remove delete append add insert
    change edit modify replace set update check verify confirm ensure list show print display look see find search
    count sort filter extract select convert compute calculate install build compile start stop restart test try fix
    apply call name rename give take get keep leave wait repeat continue finish first second third last next previous
    file files directory directories folder folders path paths line lines text word words string strings number
    numbers value values key keys column columns row rows field fields record records output input result results data
    content contents names command commands script scripts program function class module package code source header
    config configuration option options flag argument log logs error errors message messages version mode permission
    permissions user group owner process service server client port host page table database query index image type
    size length order new old empty existing current correct right wrong full whole single exact exactly same
    different needed required given found returned called stored inside step steps note now instead otherwise already
    once way true false none null yes ok failed success warning done exit root home app tmp etc usr bin var opt lib
    dev txt csv json yaml yml toml conf cfg ini md html xml sh py js ts c h cpp rs go java rb pl sql gz tar zip bak
    dat img lst ref tsv pdf png jpg so o a exe main src std def import return len range self int str float dict assert
    pass raise except with elif lambda echo fi esac
""")

# Words of ordinary programs: a solution and a test share them by habit, not by leak.
PROGRAM_WORDS = words("""
    load loads dump dumps exists isfile isdir join split strip splitlines append items encoding utf utf8 format parse
    args argv subprocess pathlib json os re math time datetime requests urllib numpy np pandas pd pytest torch random
    socket threading asyncio logging collections itertools functools typing hashlib shutil glob csv io stdin stdout
    stderr returncode capture_output check decode encode bytes bool any all sum min max sorted enumerate zip map lower
    upper startswith endswith group match compile sub findall include stdio stdlib malloc free struct const char void
    static printf fprintf fopen fclose argc null public private new this var let function require exports async await
    then catch begin end local shift eval dev pipefail euo cwd timeout text mode
""")

COMMON = frozenset(w.lower() for w in COMMANDS) | FUNCTION_WORDS | TASK_WORDS | PROGRAM_WORDS

# Numbers that a person types without having read them anywhere: small ones, modes, ports, powers, units.
COMMON_NUMBERS = words("""
    0 1 2 3 4 5 6 7 8 9 10 12 15 16 20 24 25 30 32 50 60 64 80 90 100 120 128 200 255 256 300 400 443 444 500 512 600
    640 644 664 700 711 750 755 775 777 0600 0640 0644 0700 0755 0777 1000 1024 1080 2000 2048 3000 3306 3600 4096
    5000 5432 6379 8000 8080 8192 8443 8888 9000 9090 10000 65535 65536 86400 100000 1000000
""")

_NUMERALS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty"""
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth"
NUMERALS = {word: str(i) for i, word in enumerate(_NUMERALS.split())}
NUMERALS |= {word: str(i) for i, word in enumerate(_ORDINALS.split(), start=1)}
