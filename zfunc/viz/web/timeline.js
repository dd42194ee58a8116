start(document, decode(readData(document)));
