# A repository, a clone of it, a second worktree, and what git thinks of them.
export GIT_CONFIG_NOSYSTEM=1 HOME=$PWD XDG_CONFIG_HOME=$PWD
git config --global user.name a
git config --global user.email a@b
git config --global init.defaultBranch main
git config --global gc.auto 0
export GIT_AUTHOR_DATE='2001-02-03 04:05:06 +0000' GIT_COMMITTER_DATE='2001-02-03 04:05:06 +0000'
git init -q first
for commit in $(seq "$MANY"); do
    mkdir "first/$commit"
    for n in $(seq 10); do seq "$((commit * n * n))" > "first/$commit/$n"; done
    git -C first add .
    git -C first commit -q -m "$commit"
done
git clone -q --no-local "file://$PWD/first" second
cd second
git gc -q
git fsck --strict
git checkout -q -b branch HEAD~5
git worktree add -q --detach ../third main~3
rm -r ../third/2
git -C ../third status --short
git -C ../third stash -q
git -C ../third status --short
mv 1/1 1/moved
git add -A
git status --short
git commit -q -m moved
git rebase -q main
git log --oneline --stat
git fsck --strict
git status --short
git ls-files -s
