# A package with a library of its own, built, changed, built again and tested.
export CARGO_HOME=$PWD/home CARGO_TARGET_DIR=$PWD/target CARGO_NET_OFFLINE=true
cargo new --quiet --vcs none --name outer outer
cargo new --quiet --vcs none --lib --name inner outer/inner
cd outer
echo 'inner = { path = "inner" }' >> Cargo.toml
echo 'fn main() { println!("{}", inner::add(2, 3)); }' > src/main.rs
cargo run --quiet
sed -i 's/2, 3/3, 4/' src/main.rs
# A build system compares times of changes.
touch src/main.rs
cargo run --quiet
cargo test --quiet --package inner | grep -o '^test result: ok. . passed' | head -n 1
rm -r ../target ../home
