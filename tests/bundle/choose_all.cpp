// Print what the bundle's chooser gives for every row of a table: choose_all FOLDER MANIFEST CASES
// (and, alone with a file, its SHA-256).
#include <iostream>

#include "bundle.hpp"

int main(int argc, char** argv) {
  if (argc == 3) {
    std::cout << bundle::sha256(bundle::read_file(argv[1], argv[2])) << "\n";
    return 0;
  }
  const std::string text = bundle::read_file(argv[1], argv[2]);
  const bundle::Json manifest = bundle::Parser(text).parse();
  std::istringstream lines(bundle::read_file(argv[1], argv[3]));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    std::vector<std::string> cells, providers;
    std::istringstream row(line);
    for (std::string cell; std::getline(row, cell, '\t');) cells.push_back(cell);
    std::istringstream offered(cells[3] == "-" ? "" : cells[3]);
    for (std::string name; std::getline(offered, name, ',');) providers.push_back(name);
    try {
      const auto [variant, provider] = bundle::choose(manifest, cells[1], cells[2], providers,
                                                      cells[4] == "-" ? "" : cells[4]);
      std::cout << (*variant)["target"].text << "/" << provider << "\n";
    } catch (const bundle::CheckError& error) {
      const std::string words = error.what();
      std::cout << "!" << words.substr(0, words.find(':')) << "\n";
    }
  }
}
